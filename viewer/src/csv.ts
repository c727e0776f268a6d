// A panel's data as a file for a spreadsheet.
import { FieldType, getFieldDisplayName, outerJoinDataFrames, type DataFrame } from '@grafana/data';

function cell(value: unknown): string {
  // A spreadsheet runs a text that begins like a formula.
  const text = typeof value === 'string' && /^[=+\-@\t\r]/.test(value) ? `'${value}` : String(value ?? '');
  return /[",\r\n]/.test(text) ? `"${text.replace(/"/g, '""')}"` : text;
}

// A row for each moment, or for each row of a table, and a column for each series.
export function csv(frames: DataFrame[]): string {
  const joined = frames.length > 1 ? outerJoinDataFrames({ frames }) : frames[0];
  if (!joined) {
    return '';
  }
  const lines = [joined.fields.map((field) => cell(getFieldDisplayName(field, joined, frames)))];
  for (let row = 0; row < joined.length; row++) {
    lines.push(joined.fields.map((field) => cell(
      field.type === FieldType.time ? new Date(field.values[row]).toISOString() : field.values[row])));
  }
  return lines.map((line) => `${line.join(',')}\r\n`).join('');
}

export function download(name: string, text: string): void {
  const link = document.createElement('a');
  link.href = URL.createObjectURL(new Blob([text], { type: 'text/csv' }));
  link.download = `${name}.csv`;
  link.click();
  URL.revokeObjectURL(link.href);
}
