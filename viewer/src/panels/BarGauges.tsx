import { VizOrientation } from '@grafana/data';
import { BarGauge, measureText, useTheme2 } from '@grafana/ui';
import type { Drawing } from '../model';
import { Values } from './values';

const NAMES = 0.4; // the share of a bar's width that Grafana's component gives to its name
const LARGEST = 12, SMALLEST = 9; // pixels of a name's letters

// The size of letters at which the longest name is not cut, where Grafana's own size cuts it.
function sizeOfNames(longest: string, width: number): number | undefined {
  const room = NAMES * width - 15, wanted = measureText(longest, LARGEST).width;
  return wanted > room ? Math.max((LARGEST * room) / wanted, SMALLEST) : undefined;
}

export function BarGauges(drawing: Drawing) {
  const theme = useTheme2();
  const { displayMode, showUnfilled, valueMode, namePlacement, minVizHeight, maxVizHeight } = drawing.panel.options;
  return (
    <Values drawing={drawing} orientation={VizOrientation.Horizontal} minVizHeight={minVizHeight ?? 16}
      maxVizHeight={maxVizHeight ?? 300}
      draw={({ value, width, height, factors, onClick }) => (
        <BarGauge
          value={value.display} field={value.field} width={width} height={height} theme={theme}
          orientation={VizOrientation.Horizontal} displayMode={displayMode} showUnfilled={showUnfilled}
          valueDisplayMode={valueMode} alignmentFactors={factors} onClick={onClick} itemSpacing={8}
          namePlacement={namePlacement} text={{ titleSize: sizeOfNames(factors?.title ?? '', width) }}
          display={value.view?.getFieldDisplayProcessor(value.colIndex ?? 0)}
        />
      )} />
  );
}
