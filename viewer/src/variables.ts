// Variables in queries and links, by Grafana's rules: $name, ${name}, ${name:format}, ${__field.labels.x}.
import type { DataContextScopedVar, ScopedVars, TimeRange } from '@grafana/data';
import { VariableFormatID } from '@grafana/schema';
import { ALSO } from './address';
import { labelValues } from './prometheus';
import type { Moment, VariableModel } from './model';

export const ALL = '$__all';
export type Values = Record<string, string>;

const PLACE = /\$(\w+)|\$\{(\w+)(?:\.([^:}]+))?(?::([^}]+))?\}/g;

function escaped(value: string): string {
  return value.replace(/\\/g, '\\\\').replace(/"/g, '\\"');
}

// Of a variable that may be All, the value stands in =~ and =: the special characters of a pattern lose their meaning.
function asPattern(value: string): string {
  return value.replace(/\\/g, '\\\\\\\\').replace(/[$^*{}[\]'+?.()|]/g, '\\\\$&').replace(/"/g, '\\"');
}

// How often what is scraped every `scrape` seconds is asked for, and what Grafana calls $__rate_interval.
export interface Steps {
  step: number;
  rate: number;
}

export function steps(range: TimeRange, points: number, scrape: number): Steps {
  const wanted = (range.to.valueOf() - range.from.valueOf()) / 1000 / points;
  const nice = [1, 2, 5, 10, 15, 20, 30, 60, 120, 300, 600, 900, 1200, 1800, 3600, 7200, 10800, 21600, 43200, 86400];
  const step = Math.ceil(Math.max(
    nice.find((one) => one >= wanted * 0.999) ?? Math.ceil(wanted / 86400) * 86400, scrape)); // PromQL has no 7.5s
  return { step, rate: Math.ceil(Math.max(step + scrape, 4 * scrape)) };
}

// Returns a PromQL query with the variables' values in it.
export function filled(expr: string, models: VariableModel[], values: Values, range: TimeRange, at: Steps): string {
  const seconds = Math.round((range.to.valueOf() - range.from.valueOf()) / 1000);
  const own: Record<string, string> = {
    __interval: `${at.step}s`, __interval_ms: `${at.step * 1000}`, __rate_interval: `${at.rate}s`,
    __range: `${seconds}s`, __range_s: `${seconds}`, __range_ms: `${seconds * 1000}`,
  };
  return expr.replace(PLACE, (whole, plain, braced) => {
    const name = plain ?? braced;
    if (name in own) {
      return own[name]!;
    }
    const model = models.find((one) => one.name === name);
    const value = values[name];
    if (!model || value === undefined) {
      return whole;
    }
    if (value === ALL) {
      return model.allValue ?? '.*';
    }
    if (model.includeAll || model.multi) {
      const each = value.split(ALSO).map(asPattern);
      return each.length > 1 ? `(${each.join('|')})` : each[0]!;
    }
    return model.type === 'textbox' ? value : escaped(value);
  });
}

// Returns a title, or with a format a link, with what it belongs to, the time and the variables in it.
export function linked(
  text: string, values: Values, raw: Moment, scoped?: ScopedVars, format?: string | Function
): string {
  const context = scoped?.__dataContext as DataContextScopedVar | undefined;
  const written = (value: string) => (format === VariableFormatID.UriEncode ? encodeURIComponent(value) : value);
  return text.replace(PLACE, (whole, plain, braced, path, own) => {
    const name = plain ?? braced;
    if (name === '__url_time_range') {
      return `${new URLSearchParams({ ...raw })}`;
    }
    if (name === '__field' || name === '__data') {
      return written(clicked(name, path ?? '', context));
    }
    if (own === 'queryparam') {
      return (values[name] ?? '').split(ALSO).map((one) => `var-${name}=${encodeURIComponent(one)}`).join('&');
    }
    const value = values[name] ?? scoped?.[name]?.value;
    return value === undefined ? whole : written(String(value).replaceAll(ALSO, ' + '));
  });
}

function clicked(name: string, path: string, context: DataContextScopedVar | undefined): string {
  if (!context) {
    return '';
  }
  const { field, frame, rowIndex } = context.value;
  if (name === '__field') {
    if (path.startsWith('labels')) {
      return field.labels?.[path.replace(/^labels(\.|\[["']?)/, '').replace(/["']?\]$/, '')] ?? '';
    }
    return path === 'name' ? field.name : '';
  }
  const wanted = /^fields(?:\.(\w+)|\[["']?([^"'\]]+)["']?\])/.exec(path);
  const title = wanted?.[1] ?? wanted?.[2];
  const found = frame.fields.find(
    (one) => one.name === title || one.config.displayName === title || one.state?.displayName === title
  );
  return String(found?.values[rowIndex ?? 0] ?? '');
}

// As in Grafana, the group `value` of the variable's pattern or else its first group is the value.
function matching(model: VariableModel, found: string[]): string[] {
  const wanted = /^\/(.*)\/([a-z]*)$/s.exec(model.regex ?? '');
  if (!model.regex) {
    return found;
  }
  const pattern = new RegExp(wanted ? wanted[1]! : model.regex, wanted?.[2]!.replace('g', ''));
  return [...new Set(found.flatMap((one) => {
    const match = pattern.exec(one);
    return match ? [match.groups?.value ?? match[1] ?? one] : [];
  }))];
}

const LABEL_VALUES = /^label_values\(\s*(?:(.+)\s*,\s*)?(\w+)\s*\)$/s;

// Returns what a variable may be, in order.
export async function choices(
  model: VariableModel, models: VariableModel[], values: Values, range: TimeRange, signal: AbortSignal
): Promise<string[]> {
  const text = typeof model.query === 'string' ? model.query : model.query.query;
  const asked = LABEL_VALUES.exec(text);
  if (!asked) {
    throw new Error(`variable ${model.name}: ${text} is not label_values(series, label)`);
  }
  const match = asked[1] && filled(asked[1], models, values, range, { step: 15, rate: 60 });
  const start = Math.floor(range.from.valueOf() / 1000);
  const found = await labelValues(asked[2]!, match, start, Math.ceil(range.to.valueOf() / 1000), signal);
  return matching(model, found).filter((one) => one !== '').sort(new Intl.Collator('en', { numeric: true }).compare);
}

export function legend(format: string | undefined, labels: Record<string, string>, expr: string): string {
  if (format && format !== '__auto') {
    return format.replace(/\{\{\s*([^}\s]+)\s*\}\}/g, (_, name) => labels[name] ?? '');
  }
  const { __name__: name = '', ...rest } = labels;
  const pairs = Object.entries(rest).map(([label, value]) => `${label}="${value}"`);
  return pairs.length ? `${name}{${pairs.join(', ')}}` : name || expr;
}
