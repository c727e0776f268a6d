// A dashboard as Grafana stores it, as far as the viewer reads it, and what its parts pass to one another.
import type {
  DataFrame, DataTransformerConfig, FieldConfigSource, InterpolateFunction, TimeRange,
} from '@grafana/data';

export interface Target {
  refId: string;
  expr: string; // none where it is no query of Prometheus
  legendFormat?: string;
  instant?: boolean;
  hide?: boolean;
  format?: 'time_series' | 'table' | 'heatmap';
}

export interface PanelModel {
  id: number;
  type: string;
  title: string;
  description?: string;
  gridPos: { x: number; y: number; w: number; h: number };
  targets?: Target[];
  options?: any;
  fieldConfig?: FieldConfigSource<any>;
  transformations?: DataTransformerConfig[];
  maxDataPoints?: number;
  collapsed?: boolean; // of a row, which then holds its panels
  panels?: PanelModel[];
  repeat?: string; // a variable: a copy for each of its values
  repeatDirection?: 'h' | 'v';
  maxPerRow?: number;
}

export interface VariableModel {
  type: 'datasource' | 'query' | 'textbox' | 'custom' | 'interval' | 'constant';
  name: string;
  label?: string | null;
  query: string | { query: string };
  includeAll?: boolean;
  allValue?: string | null;
  multi?: boolean;
  regex?: string;
  current?: { text?: string | string[]; value?: string | string[] };
  hide?: number;
}

export interface AnnotationModel {
  name: string;
  enable?: boolean;
  iconColor: string;
  target?: { expr?: string; interval?: string };
  titleFormat?: string;
  textFormat?: string;
}

export interface BoardModel {
  uid: string;
  title: string;
  description?: string;
  panels: PanelModel[];
  refresh?: string;
  time?: { from: string; to: string };
  timezone?: string;
  timepicker?: { refresh_intervals?: string[] };
  templating?: { list: VariableModel[] };
  annotations?: { list: AnnotationModel[] };
}

export interface BoardSummary {
  uid: string;
  title: string;
  description: string;
  tags: string[];
  annotations?: BoardModel['annotations'] | ''; // empty without any
}

export interface Settings {
  scrape_interval: number; // seconds
}

// The time that a dashboard shows, as its address writes it.
export interface Moment {
  from: string;
  to: string;
  timezone?: string; // if the address has one
}

// An annotation: a line through a chart and a bar below it.
export interface Mark {
  name: string; // of the annotation
  from: number; // milliseconds
  to: number;
  color: string;
  title: string;
  text: string;
}

// What a panel is drawn from.
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
