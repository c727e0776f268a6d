// How each type of panel is drawn; a new one is a file here and a line below.
import type { DataFrame, InterpolateFunction, TimeRange } from '@grafana/data';
import type { FunctionComponent } from 'react';
import type { PanelModel } from '../model';
import { BarGauges } from './BarGauges';
import { Gauges } from './Gauges';
import { Heatmap, StateTimeline, StatusHistory } from './Cells';
import { Lines } from './Lines';
import type { Mark } from './marks';
import { Stats } from './Stats';
import { TablePanel } from './TablePanel';

export interface Drawing {
  panel: PanelModel;
  frames: DataFrame[]; // with display processors and links
  width: number;
  height: number;
  range: TimeRange;
  zone: string;
  marks: Mark[];
  replaceVariables: InterpolateFunction;
}

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
