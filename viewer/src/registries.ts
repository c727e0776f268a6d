// What Grafana's core fills in at its start and its libraries look up: field options and transformations.
import {
  booleanOverrideProcessor, dataLinksOverrideProcessor, displayNameOverrideProcessor, identityOverrideProcessor,
  numberOverrideProcessor, standardFieldConfigEditorRegistry, standardTransformers, standardTransformersRegistry,
  stringOverrideProcessor, thresholdsOverrideProcessor, unitOverrideProcessor, valueMappingsOverrideProcessor,
  type FieldConfigPropertyItem,
} from '@grafana/data';

const PROCESSORS: Record<string, FieldConfigPropertyItem['process']> = {
  unit: unitOverrideProcessor, min: numberOverrideProcessor, max: numberOverrideProcessor,
  decimals: numberOverrideProcessor, displayName: displayNameOverrideProcessor, noValue: stringOverrideProcessor,
  thresholds: thresholdsOverrideProcessor, mappings: valueMappingsOverrideProcessor,
  links: dataLinksOverrideProcessor, color: identityOverrideProcessor, filterable: booleanOverrideProcessor,
  fieldMinMax: booleanOverrideProcessor,
};
const CUSTOM = [
  'drawStyle', 'lineWidth', 'fillOpacity', 'showPoints', 'spanNulls', 'stacking', 'thresholdsStyle', 'axisSoftMin',
  'align', 'cellOptions', 'filterable', 'width', 'hideFrom', 'scaleDistribution', 'lineStyle', 'axisPlacement',
  'transform', 'fillBelowTo', 'axisSoftMax', 'axisCenteredZero', 'axisLabel', 'axisColorMode', 'lineInterpolation',
  'gradientMode', 'pointSize', 'barAlignment', 'lineColor', 'minWidth', 'wrapText', 'hidden',
];

function option(path: string, process: FieldConfigPropertyItem['process'], isCustom: boolean): FieldConfigPropertyItem {
  const nothing = () => null;
  return {
    id: isCustom ? `custom.${path}` : path, path, name: path, isCustom, process, shouldApply: () => true,
    editor: nothing, override: nothing, settings: { expandTemplateVars: true },
  };
}

export function fill(): void {
  standardFieldConfigEditorRegistry.setInit(() => [
    ...Object.entries(PROCESSORS).map(([path, process]) => option(path, process, false)),
    ...CUSTOM.map((path) => option(path, identityOverrideProcessor, true)),
  ]);
  standardTransformersRegistry.setInit(() =>
    [...new Map(Object.values(standardTransformers).map((made) => [made.id, made])).values()].map((made) => ({
      id: made.id, name: made.name, description: made.description, editor: () => null,
      transformation: () => Promise.resolve(made), imageDark: '', imageLight: '',
    }))
  );
}
