// What Prometheus answers, as the data frames that Grafana's own data source makes of it.
import { createDataFrame, FieldType, type DataFrame, type Field } from '@grafana/data';
import type { Target } from './model';
import type { Series } from './prometheus';
import { legend } from './variables';

function number(text: string): number | null {
  const value = text === '+Inf' ? Infinity : text === '-Inf' ? -Infinity : Number(text);
  return Number.isNaN(value) ? null : value;
}

// A frame for each series; `step` lets what draws lines see the holes.
export function seriesFrames(target: Target, found: Series[], step: number): DataFrame[] {
  return found.map((series) =>
    createDataFrame({
      refId: target.refId,
      fields: [
        {
          name: 'Time', type: FieldType.time, config: { interval: step * 1000 },
          values: series.values.map(([time]) => time * 1000),
        },
        {
          name: 'Value', type: FieldType.number, labels: series.metric,
          config: { displayNameFromDS: legend(target.legendFormat, series.metric, target.expr) },
          values: series.values.map(([, value]) => number(value)),
        },
      ],
    })
  );
}

// One frame with a column for each label, and the value, named as Grafana names it when there are other queries.
export function tableFrame(target: Target, found: Series[], only: boolean): DataFrame {
  const labels = [...new Set(found.flatMap((series) => Object.keys(series.metric)))].sort();
  const column = (name: string, type: FieldType, values: unknown[]): Omit<Field, 'config'> & { config: object } => ({
    name, type, values, config: { filterable: true },
  });
  const rows = found.flatMap((series) => series.values.map((point) => ({ labels: series.metric, point })));
  return createDataFrame({
    refId: target.refId,
    fields: rows.length === 0 ? [] : [
      column('Time', FieldType.time, rows.map((row) => row.point[0] * 1000)),
      ...labels.map((label) => column(label, FieldType.string, rows.map((row) => row.labels[label] ?? ''))),
      column(only ? 'Value' : `Value #${target.refId}`, FieldType.number, rows.map((row) => number(row.point[1]))),
    ],
  });
}
