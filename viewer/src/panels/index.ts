// How each type of panel is drawn; a new one is a file here and a line below.
import type { FunctionComponent } from 'react';
import type { Drawing } from '../model';
import { BarGauges } from './BarGauges';
import { Gauges } from './Gauges';
import { Heatmap, StateTimeline, StatusHistory } from './Cells';
import { Lines } from './Lines';
import { Stats } from './Stats';
import { TablePanel } from './TablePanel';

export const PANELS: Record<string, FunctionComponent<Drawing>> = {
  timeseries: Lines,
  stat: Stats,
  gauge: Gauges,
  bargauge: BarGauges,
  table: TablePanel,
  'state-timeline': StateTimeline,
  'status-history': StatusHistory,
  heatmap: Heatmap,
};
