// Rows of coloured cells along time: state timeline, status history and heatmap, which Grafana's libraries leave to its
// core. A stand-in of the same options, on the plotting library that the others use.
import {
  colorManipulator, dateTimeFormat, FieldType, formattedValueToString, getFieldDisplayName, type DataFrame, type DisplayValue,
  type Field, type GrafanaTheme2, type TimeRange,
} from '@grafana/data';
import { AxisPlacement, LegendDisplayMode, ScaleDirection, ScaleOrientation } from '@grafana/schema';
import {
  UPlotChart, UPlotConfigBuilder, useTheme2, VizLayout, VizLegend, VizTooltipContainer, VizTooltipContent,
  VizTooltipFooter, VizTooltipHeader, VizTooltipWrapper, type VizLegendItem,
} from '@grafana/ui';
import * as schemes from 'd3-scale-chromatic';
import { useMemo, useRef, useState } from 'react';
import type uPlot from 'uplot';
import type { Drawing } from '../model';
import { Marks } from './marks';

interface Cell {
  from: number; // milliseconds
  to: number;
  row: number; // of the field's values
  display: DisplayValue;
}

interface Row {
  name: string;
  field: Field;
  cells: Cell[];
}

interface Style {
  color: (cell: Cell) => string;
  share: number; // of a row's height that a cell takes
  gap: number; // pixels between two cells of a row
  text: boolean;
}

function rowsOf(frames: DataFrame[], range: TimeRange, merged: boolean): Row[] {
  return frames.flatMap((frame) => {
    const time = frame.fields.find((field) => field.type === FieldType.time);
    if (!time) {
      return [];
    }
    const step = time.config.interval ?? 15_000;
    return frame.fields.filter((field) => field.type === FieldType.number).map((field) => {
      const cells: Cell[] = [];
      for (let row = 0; row < frame.length; row++) {
        const value = field.values[row], from = time.values[row], next = time.values[row + 1];
        if (value == null) {
          continue;
        }
        const to = Math.min(next !== undefined && next - from <= 1.5 * step ? next : from + step, range.to.valueOf());
        const last = cells.at(-1);
        if (merged && last && last.to === from && field.values[last.row] === value) {
          last.to = to;
        } else {
          cells.push({ from, to, row, display: field.display!(value) });
        }
      }
      return { name: getFieldDisplayName(field, frame, frames), field, cells };
    });
  });
}

function prepared(rows: Row[], style: Style, range: TimeRange, zone: string, theme: GrafanaTheme2, height: number) {
  const builder = new UPlotConfigBuilder(zone);
  const each = Math.max(1, Math.ceil((rows.length * 14) / Math.max(height - 30, 14))); // labels that do not overlap
  builder.addScale({
    scaleKey: 'x', isTime: true, orientation: ScaleOrientation.Horizontal, direction: ScaleDirection.Right,
    range: () => [range.from.valueOf(), range.to.valueOf()],
  });
  builder.addScale({
    scaleKey: 'y', isTime: false, orientation: ScaleOrientation.Vertical, direction: ScaleDirection.Down,
    range: () => [0, rows.length],
  });
  builder.addAxis({
    scaleKey: 'x', isTime: true, placement: AxisPlacement.Bottom, timeZone: zone, theme, grid: { show: false },
  });
  builder.addAxis({
    scaleKey: 'y', placement: AxisPlacement.Left, theme, grid: { show: false }, ticks: { show: false },
    splits: () => rows.map((_, i) => i + 0.5).filter((_, i) => i % each === 0),
    values: (_, splits) => splits.map((split) => short(rows[Math.floor(split)]?.name ?? '')),
  });
  builder.addSeries({ scaleKey: 'y', theme, pathBuilder: () => null, pointsBuilder: () => false });
  builder.setCursor({ drag: { x: false, y: false }, points: { show: false } });
  builder.addHook('draw', (drawn) => paint(drawn, rows, style, theme));
  return builder;
}

function short(name: string): string {
  return name.length > 32 ? `${name.slice(0, 31)}…` : name;
}

function paint(drawn: uPlot, rows: Row[], style: Style, theme: GrafanaTheme2): void {
  const { ctx, bbox } = drawn;
  const ratio = devicePixelRatio;
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  ctx.font = `${12 * ratio}px ${theme.typography.fontFamily}`;
  ctx.textBaseline = 'middle';
  ctx.textAlign = 'left';
  const tall = bbox.height / Math.max(rows.length, 1);
  rows.forEach((row, i) => {
    const high = Math.max(tall * style.share, 1);
    const top = bbox.top + i * tall + (tall - high) / 2;
    for (const cell of row.cells) {
      const left = drawn.valToPos(cell.from, 'x', true);
      const wide = Math.max(drawn.valToPos(cell.to, 'x', true) - left - style.gap * ratio, 1);
      ctx.fillStyle = style.color(cell);
      ctx.fillRect(left, top, wide, high);
      const text = style.text && high > 14 * ratio ? formattedValueToString(cell.display) : '';
      if (text && ctx.measureText(text).width < wide - 8 * ratio) {
        ctx.fillStyle = theme.colors.getContrastText(style.color(cell));
        ctx.fillText(text, left + 4 * ratio, top + high / 2);
      }
    }
  });
  ctx.restore();
}

interface Seen {
  row: Row;
  cell: Cell;
  x: number;
  y: number;
  pinned: boolean;
}

function Cells({ drawing, rows, style, legend }: {
  drawing: Drawing; rows: Row[]; style: Style; legend: React.ReactNode;
}) {
  const theme = useTheme2();
  const { width, height, range, zone, marks } = drawing;
  const plot = useRef<uPlot>(null);
  const [seen, setSeen] = useState<Seen>();
  const room = Math.max(height - 30, 40);
  const config = useMemo(
    () => prepared(rows, style, range, zone, theme, room), [rows, style, range, zone, theme, room]);
  const data = useMemo<uPlot.AlignedData>(
    () => [[range.from.valueOf(), range.to.valueOf()], [null, null]], [range]);

  const look = (event: React.MouseEvent, pinned: boolean) => {
    const box = plot.current?.over.getBoundingClientRect();
    if (!box || (seen?.pinned && !pinned)) {
      return;
    }
    const time = plot.current!.posToVal(event.clientX - box.left, 'x');
    const row = rows[Math.floor(((event.clientY - box.top) / box.height) * rows.length)];
    const cell = row?.cells.find((one) => one.from <= time && time < one.to);
    setSeen(row && cell && { row, cell, x: event.clientX, y: event.clientY, pinned });
  };
  const links = seen?.row.field.getLinks?.({ valueRowIndex: seen.cell.row }) ?? [];
  return (
    <div onMouseMove={(event) => look(event, false)} onMouseLeave={() => !seen?.pinned && setSeen(undefined)}
      onClick={(event) => (seen?.pinned ? setSeen(undefined) : look(event, true))}>
      <UPlotChart config={config} data={data} width={width} height={room} plotRef={(made) => (plot.current = made)}>
        <Marks config={config} marks={marks} />
      </UPlotChart>
      {legend}
      {seen && (
        <VizTooltipContainer position={{ x: seen.x, y: seen.y }} offset={{ x: 10, y: 10 }}
          allowPointerEvents={seen.pinned}>
          <VizTooltipWrapper>
            <VizTooltipHeader isPinned={seen.pinned} item={{
              label: dateTimeFormat(seen.cell.from, { timeZone: zone }), value: seen.cell.to - seen.cell.from > 60_000
                ? `to ${dateTimeFormat(seen.cell.to, { timeZone: zone })}` : '',
            }} />
            <VizTooltipContent isPinned={seen.pinned} items={[{
              label: seen.row.name, value: formattedValueToString(seen.cell.display), color: style.color(seen.cell),
            }]} />
            {seen.pinned && links.length > 0 && <VizTooltipFooter dataLinks={links} />}
          </VizTooltipWrapper>
        </VizTooltipContainer>
      )}
    </div>
  );
}

function Legend({ rows }: { rows: Row[] }) {
  const shown = new Map<string, string>();
  rows.forEach((row) => row.cells.forEach((cell) => shown.set(cell.display.text, cell.display.color ?? '')));
  const items: VizLegendItem[] = [...shown].map(([label, color]) => ({ label, color, yAxis: 1 }));
  return <VizLegend items={items} placement="bottom" displayMode={LegendDisplayMode.List} />;
}

function States({ drawing, merged, gap }: { drawing: Drawing; merged: boolean; gap: number }) {
  const { frames, range, panel } = drawing;
  const { rowHeight = 0.9, showValue } = panel.options;
  const rows = useMemo(() => rowsOf(frames, range, merged), [frames, range, merged]);
  const style = useMemo<Style>(() => ({
    color: (cell) => cell.display.color ?? '#888', share: rowHeight, gap, text: showValue !== 'never',
  }), [rowHeight, gap, showValue]);
  return <Cells drawing={drawing} rows={rows} style={style} legend={<Legend rows={rows} />} />;
}

export function StateTimeline(drawing: Drawing) {
  return <States drawing={drawing} merged={drawing.panel.options.mergeValues !== false} gap={0} />;
}

export function StatusHistory(drawing: Drawing) {
  return <States drawing={drawing} merged={false} gap={1} />;
}

export function Heatmap(drawing: Drawing) {
  const theme = useTheme2();
  const { frames, range, panel } = drawing;
  const { mode, fill, scheme = 'Oranges', exponent = 1, min = 0, max, reverse = false } = panel.options.color;
  const rows = useMemo(() => rowsOf(frames, range, false), [frames, range]);
  const top = max ?? Math.max(...rows.flatMap((row) => row.cells.map((cell) => cell.display.numeric)), 1e-9);
  const colored = useMemo(() => {
    if (mode === 'opacity') {
      const full = theme.visualization.getColorByName(fill);
      return (share: number) => colorManipulator.alpha(full, share);
    }
    const picked = (schemes as unknown as Record<string, (share: number) => string>)[`interpolate${scheme}`]!;
    const dark = theme.isDark !== reverse; // as in Grafana: what is little fades into the background
    return (share: number) => picked(dark ? 1 - share : share);
  }, [mode, fill, scheme, reverse, theme]);
  const style = useMemo<Style>(() => ({
    color: (cell) => colored(Math.min(Math.max((cell.display.numeric - min) / (top - min), 0), 1) ** exponent),
    share: rows.length > 40 ? 1 : 0.92, gap: 0, text: false,
  }), [colored, min, top, exponent, rows.length]);
  const display = rows[0]?.field.display;
  const format = (value: number) => (display ? formattedValueToString(display(value)) : `${value}`);
  const ends = Array.from({ length: 9 }, (_, i) => colored((i / 8) ** exponent));
  return (
    <VizLayout width={drawing.width} height={drawing.height}>
      {(width, height) => (
        <Cells drawing={{ ...drawing, width, height }} rows={rows} style={style} legend={
          <div className="scale">
            <span>{format(min)}</span>
            <i style={{ background: `linear-gradient(to right, ${ends.join(', ')})` }} />
            <span>{format(top)}</span>
          </div>
        } />
      )}
    </VizLayout>
  );
}
