// A dial, which Grafana's libraries leave to its core: a stand-in of the same options.
import { useTheme2 } from '@grafana/ui';
import type { Drawing } from '../model';
import { Values, type One } from './values';

const FROM = -120, TO = 120; // degrees, 0 is up

function arc(cx: number, cy: number, radius: number, from: number, to: number): string {
  const at = (degrees: number) => {
    const turned = ((degrees - 90) * Math.PI) / 180;
    return `${(cx + radius * Math.cos(turned)).toFixed(2)} ${(cy + radius * Math.sin(turned)).toFixed(2)}`;
  };
  return `M ${at(from)} A ${radius} ${radius} 0 ${to - from > 180 ? 1 : 0} 1 ${at(to)}`;
}

function Dial({ value, width, height, count, onClick, markers }: One & { markers: boolean }) {
  const theme = useTheme2();
  const { display, field } = value;
  const titled = count > 1 && Boolean(display.title);
  const min = field.min ?? 0, max = field.max ?? 100;
  const room = height - (titled ? 20 : 0);
  const radius = Math.max(Math.min(width / 2, room / 1.6) - 6, 10);
  const cx = width / 2, cy = radius + 6;
  const share = (number: number) => Math.min(Math.max((number - min) / (max - min || 1), 0), 1);
  const angle = (number: number) => FROM + (TO - FROM) * share(number);
  const thick = radius / 4;
  const ring = { fill: 'none', strokeWidth: thick };
  const edges = (field.thresholds?.steps ?? []).map((step, i, all) => ({
    color: theme.visualization.getColorByName(step.color),
    from: angle(Math.max(step.value ?? -Infinity, min)), to: angle(Math.min(all[i + 1]?.value ?? Infinity, max)),
  }));
  const text = `${display.prefix ?? ''}${display.text}${display.suffix ?? ''}`;
  return (
    <svg width={width} height={height} onClick={onClick as never} cursor={onClick && 'pointer'} role="img"
      aria-label={`${display.title ?? ''} ${text}`}>
      <path d={arc(cx, cy, radius - thick / 2, FROM, TO)} stroke={theme.colors.background.secondary} {...ring} />
      {Number.isFinite(display.numeric) && (
        <path d={arc(cx, cy, radius - thick / 2, FROM, angle(display.numeric))} stroke={display.color} {...ring} />
      )}
      {markers && edges.filter((edge) => edge.to > edge.from).map((edge) => (
        <path key={edge.from} d={arc(cx, cy, radius + 3, edge.from, edge.to)} stroke={edge.color} fill="none"
          strokeWidth={3} />
      ))}
      <text x={cx} y={cy + radius * 0.12} textAnchor="middle" fill={display.color} fontWeight={500}
        fontSize={Math.min(radius * 0.42, (radius * 2.2) / Math.max(text.length, 4))}>{text}</text>
      {titled && (
        <text x={cx} y={height - 6} textAnchor="middle" fill={theme.colors.text.primary} fontSize={12}>
          {display.title}
        </text>
      )}
    </svg>
  );
}

export function Gauges(drawing: Drawing) {
  return (
    <Values drawing={drawing} autoGrid
      draw={(one) => <Dial {...one} markers={drawing.panel.options.showThresholdMarkers !== false} />} />
  );
}
