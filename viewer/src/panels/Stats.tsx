import { BigValue, BigValueGraphMode, BigValueTextMode, useTheme2 } from '@grafana/ui';
import type { Drawing } from '../model';
import { Values } from './values';

export function Stats(drawing: Drawing) {
  const theme = useTheme2();
  const { colorMode, graphMode, justifyMode, textMode } = drawing.panel.options;
  return (
    <Values drawing={drawing} sparkline={graphMode !== BigValueGraphMode.None} autoGrid
      draw={({ value, width, height, count, factors, onClick }) => (
        <BigValue
          value={value.display} sparkline={value.sparkline} width={width} height={height} theme={theme} count={count}
          colorMode={colorMode} graphMode={graphMode} justifyMode={justifyMode} alignmentFactors={factors}
          textMode={textMode ?? BigValueTextMode.Auto} onClick={onClick} hasLinks={value.hasLinks}
        />
      )} />
  );
}
