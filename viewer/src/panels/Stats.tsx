import { BigValue, BigValueGraphMode, BigValueTextMode, useTheme2 } from '@grafana/ui';
import type { Drawing } from '../model';
import { Values } from './values';

// Whether a text on one line would be too small to read. Then it is wrapped, which Grafana's component cannot do.
function tooLong(text: string | undefined, width: number): boolean {
  return (text?.length ?? 0) * 8 > width;
}

export function Stats(drawing: Drawing) {
  const theme = useTheme2();
  const { colorMode, graphMode, justifyMode, textMode } = drawing.panel.options;
  return (
    <Values drawing={drawing} sparkline={graphMode !== BigValueGraphMode.None} autoGrid
      draw={({ value, width, height, count, factors, onClick }) => textMode === 'name' && tooLong(value.display.title, width) ? (
        <button type="button" className="sentence" style={{ width, height, color: value.display.color }} onClick={onClick}>
          {value.display.title}
        </button>
      ) : (
        <BigValue
          value={value.display} sparkline={value.sparkline} width={width} height={height} theme={theme} count={count}
          colorMode={colorMode} graphMode={graphMode} justifyMode={justifyMode} alignmentFactors={factors}
          textMode={textMode ?? BigValueTextMode.Auto} onClick={onClick} hasLinks={value.hasLinks}
        />
      )} />
  );
}
