import { formattedValueToString, type DataFrame, type Field } from '@grafana/data';
import { TableCellHeight } from '@grafana/schema';
import { useTheme2 } from '@grafana/ui';
import { TableNG } from '@grafana/ui/unstable';
import { useMemo } from 'react';
import type { Drawing } from '../model';

function columns(frame: DataFrame): Field[] {
  return frame.fields.filter((field) => !field.config.custom?.hidden && !field.config.custom?.hideFrom?.viz);
}

// Pixels that a column takes at least.
function least(field: Field): number {
  return field.config.custom?.width ?? field.config.custom?.minWidth ?? 90;
}

function heading(field: Field): string {
  return field.state?.displayName ?? field.config.displayName ?? field.name;
}

// The rows in the order that the panel asks for.
function sorted(frame: DataFrame, sortBy: Array<{ displayName: string; desc?: boolean }> = []): number[] {
  const rows = Array.from({ length: frame.length }, (_, row) => row);
  const by = sortBy[0], field = by && frame.fields.find((one) => heading(one) === by.displayName);
  if (!field) {
    return rows;
  }
  const [empty, sign] = by.desc ? [-Infinity, -1] : [Infinity, 1];
  const value = (row: number) => field.values[row] ?? empty;
  return rows.sort((one, other) => sign * (value(one) < value(other) ? -1 : value(one) > value(other) ? 1 : 0));
}

// A table with more columns than there is room for: each row is a block of headings and values that wraps.
function Blocks({ panel, frame, width, height }: Omit<Drawing, 'frames'> & { frame: DataFrame }) {
  const theme = useTheme2();
  const rows = useMemo(() => sorted(frame, panel.options.sortBy), [frame, panel]);
  return (
    <ul className="blocks" style={{ width, height }} tabIndex={0} aria-label={panel.title}>
      {rows.map((row) => (
        <li key={row}>
          {columns(frame).filter((field) => field.values[row] != null && field.values[row] !== '').map((field) => {
            const display = field.display!(field.values[row]);
            const link = field.getLinks?.({ valueRowIndex: row })[0];
            const colored = field.config.custom?.cellOptions?.type === 'color-text' ? display.color : undefined;
            return (
              <span key={heading(field)}>
                <small>{heading(field)}</small>{' '}
                {link ? <a style={{ color: theme.colors.text.link }} href={link.href} target={link.target}>{formattedValueToString(display)}</a>
                  : <b style={{ color: colored }}>{formattedValueToString(display)}</b>}
              </span>
            );
          })}
        </li>
      ))}
    </ul>
  );
}

export function TablePanel(drawing: Drawing) {
  const { panel, frames, width, height, range } = drawing;
  const frame = frames[0]!;
  const { showHeader, sortBy, cellHeight } = panel.options;
  if (columns(frame).reduce((sum, field) => sum + least(field), 0) > width) {
    return <Blocks {...drawing} frame={frame} />;
  }
  return (
    <TableNG
      data={frame} width={width} height={height} noHeader={!showHeader} sortBy={sortBy}
      cellHeight={cellHeight ?? TableCellHeight.Sm} fieldConfig={panel.fieldConfig} timeRange={range}
      enableVirtualization
    />
  );
}
