// The query API of Prometheus, through our own server.
export type Labels = Record<string, string>;
export type Point = [time: number, value: string];

export interface Series {
  metric: Labels;
  values: Point[];
}

// A browser opens six connections to a server; more questions would wait there, where nothing can cancel them.
const AT_ONCE = 6;
let running = 0;
const waiting: Array<() => void> = [];

// Whether an earlier round of questions is still under way.
export function busy(): boolean {
  return running > 0;
}

async function turn<T>(work: () => Promise<T>): Promise<T> {
  if (running >= AT_ONCE) {
    await new Promise<void>((resolve) => waiting.push(resolve));
  }
  running += 1;
  try {
    return await work();
  } finally {
    running -= 1;
    waiting.shift()?.();
  }
}

async function ask(path: string, parameters: Record<string, string>, signal: AbortSignal): Promise<any> {
  return turn(async () => {
    signal.throwIfAborted();
    const answer = await fetch(`/api/prometheus/${path}`, {
      method: 'POST',
      body: new URLSearchParams(parameters), // in the body: a query may be longer than a URL
      signal,
    });
    const body = await answer.json().catch(() => ({ error: `the server answers ${answer.status}` }));
    if (body.status !== 'success') {
      throw new Error(body.error ?? body.detail ?? `the server answers ${answer.status}`);
    }
    return body.data;
  });
}

export async function queryRange(
  expr: string, start: number, end: number, step: number, signal: AbortSignal
): Promise<Series[]> {
  const data = await ask('query_range', { query: expr, start: `${start}`, end: `${end}`, step: `${step}` }, signal);
  return data.result;
}

export async function query(expr: string, time: number, signal: AbortSignal): Promise<Series[]> {
  const data = await ask('query', { query: expr, time: `${time}` }, signal);
  if (data.resultType === 'scalar') {
    return [{ metric: {}, values: [data.result] }];
  }
  return data.result.map((one: { metric: Labels; value: Point }) => ({ metric: one.metric, values: [one.value] }));
}

export async function labelValues(
  label: string, match: string | undefined, start: number, end: number, signal: AbortSignal
): Promise<string[]> {
  return turn(async () => {
    const given = new URLSearchParams({ start: `${start}`, end: `${end}`, ...(match ? { 'match[]': match } : {}) });
    const answer = await fetch(`/api/prometheus/label/${encodeURIComponent(label)}/values?${given}`, { signal });
    const body = await answer.json().catch(() => ({}));
    if (body.status !== 'success') {
      throw new Error(body.error ?? `the server answers ${answer.status}`);
    }
    return body.data;
  });
}
