import { TableCellHeight } from '@grafana/schema';
import { TableNG } from '@grafana/ui/unstable';
import type { Drawing } from '../model';

export function TablePanel({ panel, frames, width, height, range }: Drawing) {
  const { showHeader, sortBy, cellHeight } = panel.options;
  return (
    <TableNG
      data={frames[0]!} width={width} height={height} noHeader={!showHeader} sortBy={sortBy}
      cellHeight={cellHeight ?? TableCellHeight.Sm} fieldConfig={panel.fieldConfig} timeRange={range}
      enableVirtualization
    />
  );
}
