import { BigValue, BigValueGraphMode, BigValueTextMode, useTheme2 } from '@grafana/ui';
import type { Drawing } from '../model';
import { Values } from './values';

// Whether a text on one line would be small. Then it is wrapped between words; Grafana's component also cuts at a hyphen.
function long(text: string | undefined, width: number): boolean {
  return (text?.length ?? 0) * 14 > width;
}

export function Stats(drawing: Drawing) {
  const theme = useTheme2();
  const { colorMode, graphMode, justifyMode, textMode } = drawing.panel.options;
  return (
    <Values drawing={drawing} sparkline={graphMode !== BigValueGraphMode.None} autoGrid
      draw={({ value, width, height, count, factors, onClick }) => textMode === 'name' && long(value.display.title, width) ? (
        <button type="button" className="sentence" style={{ width, height, color: value.display.color }} onClick={onClick}>
          <span>{value.display.title?.split(' ').map((word, i) => [i ? ' ' : '', <i key={i}>{word}</i>])}</span>
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
