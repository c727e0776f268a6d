import { VizOrientation } from '@grafana/data';
import { BarGauge, useTheme2 } from '@grafana/ui';
import type { Drawing } from '../model';
import { Values } from './values';

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
          namePlacement={namePlacement}
          display={value.view?.getFieldDisplayProcessor(value.colIndex ?? 0)}
        />
      )} />
  );
}
