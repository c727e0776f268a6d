// One dashboard: its variables, its time and its panels, in rows that can be folded.
import { getTimeZoneInfo, rangeUtil, type TimeRange } from '@grafana/data';
import {
  Alert, Combobox, Dropdown, Input, Menu, MultiCombobox, RefreshPicker, TimeRangePicker, ToolbarButton,
  useTheme2,
} from '@grafana/ui';
import { useCallback, useEffect, useMemo, useRef, useState } from 'react';
import { Alone } from './Alone';
import { ALSO, set } from './address';
import { Keys } from './keys';
import { sections, type Placed, type Section } from './layout';
import type { BoardModel, BoardSummary, Mark, Moment, Settings, VariableModel } from './model';
import { Panel, type Asking } from './Panel';
import { busy, queryRange } from './prometheus';
import { ALL, choices, filled, legend, linked, steps, type Values } from './variables';

const CELL = 30, GAP = 8; // pixels of Grafana's grid

function parsed(raw: Moment, zone: string): TimeRange {
  const one = (text: string) => (/^\d{1,15}$/.test(text) ? new Date(Number(text)).toISOString() : text);
  return rangeUtil.convertRawToRange({ from: one(raw.from), to: one(raw.to) }, zone);
}

// The time zone of an address or a board, or the browser's if that is not a time zone.
function known(zone: string): string {
  return zone && getTimeZoneInfo(zone, Date.now()) ? zone : 'browser';
}

// Grafana's addresses write times as milliseconds or as now-1h.
function written(time: TimeRange['raw']['from']): string {
  return typeof time === 'string' ? time : `${time.valueOf()}`;
}

interface Chosen {
  values: Values;
  options: Record<string, string[]>;
  error?: string;
}

// The choices of a variable without a query, and its default.
function fixed(model: VariableModel): string[] {
  const text = typeof model.query === 'string' ? model.query : model.query?.query ?? '';
  switch (model.type) {
    case 'datasource':
      return ['prometheus'];
    case 'custom':
    case 'interval':
      return text.split(',').map((one) => one.trim()).filter(Boolean);
    default:
      return [text];
  }
}

function useVariables(models: VariableModel[], given: Values, range: TimeRange): Chosen | undefined {
  const [chosen, setChosen] = useState<Chosen>();
  const last = useRef<Chosen>(undefined);
  last.current = chosen;
  const asked = JSON.stringify(given);
  useEffect(() => {
    const stop = new AbortController();
    const choose = async (): Promise<Chosen> => {
      const values: Values = {}, options: Record<string, string[]> = {};
      let error: string | undefined;
      for (const model of models) { // in order: one may depend on those before it
        const wanted = given[model.name];
        let found: string[];
        if (model.type !== 'query') {
          found = fixed(model);
        } else {
          try {
            found = await choices(model, models, values, range, stop.signal);
            found = model.includeAll ? [ALL, ...found] : found;
          } catch (problem) {
            if (stop.signal.aborted) {
              throw problem;
            }
            error = (problem as Error).message;
            found = last.current?.options[model.name] ?? [];
          }
        }
        options[model.name] = found;
        values[model.name] = wanted || (found[0] ?? '');
      }
      return { values, options, error };
    };
    choose().then(
      (made) => {
        if (stop.signal.aborted) {
          return;
        }
        setChosen((before) => {
          const same = before && JSON.stringify(before.values) === JSON.stringify(made.values);
          return { ...made, values: same ? before.values : made.values };
        });
        // A default stays while the board is open, and is part of a copied link.
        const taken = models.filter((model) => model.type === 'query' && !given[model.name] && made.values[model.name]);
        if (taken.length && !made.error) {
          set(Object.fromEntries(taken.map((model) => [`var-${model.name}`, made.values[model.name]])), true);
        }
      },
      () => undefined
    );
    return () => stop.abort();
  }, [models, asked, range]);
  return chosen;
}

// The variables whose choices are asked for with this one's value: another value may leave none of what they are.
function dependents(model: VariableModel, models: VariableModel[]): VariableModel[] {
  const uses = new RegExp(`\\$\\{?${model.name}\\b`);
  return models.filter((one) => one.type === 'query' && uses.test(
    typeof one.query === 'string' ? one.query : one.query.query));
}

// The interval of a refresh in milliseconds; undefined if it is not an interval or is too short.
function every(refresh: string): number | undefined {
  try {
    const milliseconds = rangeUtil.intervalToMs(refresh);
    return milliseconds >= 1000 ? milliseconds : undefined;
  } catch {
    return undefined;
  }
}

function useMarks(board: BoardModel, chosen: Chosen | undefined, range: TimeRange, scrape: number): Mark[] {
  const [marks, setMarks] = useState<Mark[]>([]);
  const values = chosen?.values, models = board.templating?.list;
  useEffect(() => {
    if (!values || !models) {
      return;
    }
    const stop = new AbortController();
    const ask = async (): Promise<Mark[]> => {
      const every = (board.annotations?.list ?? []).filter((one) => one.enable !== false && one.target?.expr);
      const found = await Promise.allSettled(every.map(async (one) => {
        const at = steps(range, 500, Math.max(scrape, 15));
        const expr = filled(one.target!.expr!, models, values, range, at);
        const last = Math.floor(range.to.valueOf() / 1000 / at.step) * at.step;
        const first = Math.floor(range.from.valueOf() / 1000 / at.step) * at.step;
        const series = await queryRange(expr, first, last, at.step, stop.signal);
        return series.flatMap(({ metric, values: points }) => {
          const made: Mark[] = [];
          for (const [time] of points) {
            const before = made.at(-1);
            if (before && time * 1000 - before.to <= at.step * 1500) {
              before.to = time * 1000;
            } else {
              made.push({
                name: one.name, from: time * 1000, to: time * 1000, color: one.iconColor,
                title: legend(one.titleFormat, metric, one.name), text: legend(one.textFormat || ' ', metric, ''),
              });
            }
          }
          return made;
        });
      }));
      return found.flatMap((one) => (one.status === 'fulfilled' ? one.value : []));
    };
    ask().then((made) => !stop.signal.aborted && setMarks(made), () => undefined); // the panels are right without
    return () => stop.abort();
  }, [board, values, models, range, scrape]);
  return marks;
}

// What a copy of a row or a panel asks for: the variable has one value there.
function useOwn(asking: Asking, own: Values | undefined): Asking {
  const mine = JSON.stringify(own);
  return useMemo(() => (mine ? { ...asking, values: { ...asking.values, ...JSON.parse(mine) } } : asking), [asking, mine]);
}

function Cell({ placed, top, asking }: { placed: Placed; top: number; asking: Asking }) {
  const { panel } = placed;
  const { x, y, w, h } = panel.gridPos;
  return (
    <div className="cell" data-wide={w > 12 || undefined} style={{
      gridColumn: `${x + 1} / span ${w}`, gridRow: `${y - top + 1} / span ${h}`,
      ['--tall' as string]: `${h * (CELL + GAP) - GAP}px`,
    }}>
      <Panel panel={panel} id={placed.key} asking={useOwn(asking, placed.own)} />
    </div>
  );
}

function Row({ heading, panels, own, asking }: Section & { asking: Asking }) {
  const [folded, setFolded] = useState(false);
  const top = Math.min(...panels.map(({ panel }) => panel.gridPos.y));
  const mine = useOwn(asking, own);
  return (
    <>
      {heading && (
        <h2 className="heading">
          <button type="button" aria-expanded={!folded} onClick={() => setFolded(!folded)}>
            {folded ? '▸' : '▾'} {linked(heading.title, mine.values, mine.raw)}
          </button>
        </h2>
      )}
      {!folded && (
        <div className="grid">
          {panels.map((placed) => <Cell key={placed.key} placed={placed} top={top} asking={mine} />)}
        </div>
      )}
    </>
  );
}

function Single({ placed, own, asking, explored }: {
  placed: Placed; own?: Values; asking: Asking; explored: boolean;
}) {
  const mine = useOwn(useOwn(asking, own), placed.own);
  return <Alone panel={placed.panel} id={placed.key} asking={mine} explored={explored} />;
}

export function Board({ board, boards, parameters, settings, theme }: {
  board: BoardModel; boards: BoardSummary[]; parameters: URLSearchParams; settings: Settings; theme: React.ReactNode;
}) {
  const raw: Moment = useMemo(() => ({
    from: parameters.get('from') ?? board.time?.from ?? 'now-1h', to: parameters.get('to') ?? board.time?.to ?? 'now',
    ...(parameters.has('timezone') && { timezone: parameters.get('timezone')! }),
  }), [parameters.get('from'), parameters.get('to'), parameters.get('timezone'), board]);
  const refresh = parameters.get('refresh') ?? board.refresh ?? '';
  const [tick, setTick] = useState(0);
  const zone = known(raw.timezone ?? board.timezone ?? '');
  const range = useMemo(() => parsed(raw, zone), [raw, zone, tick]);
  useEffect(() => {
    const interval = refresh ? every(refresh) : undefined;
    if (!interval || !raw.to.includes('now')) {
      return;
    }
    // Not while the last round is under way: on a slow Prometheus, what is asked last would never be answered.
    const timer = setInterval(() => !document.hidden && !busy() && setTick((before) => before + 1), interval);
    return () => clearInterval(timer);
  }, [refresh, raw]);

  const models = useMemo(() => board.templating?.list ?? [], [board]);
  const given: Values = {};
  for (const [name, value] of parameters) {
    if (name.startsWith('var-')) {
      const before = given[name.slice(4)];
      given[name.slice(4)] = before === undefined ? value : `${before}${ALSO}${value}`;
    }
  }
  const chosen = useVariables(models, given, range);
  const marks = useMarks(board, chosen, range, settings.scrape_interval);
  const colors = useTheme2();
  const values = chosen?.values;
  const asking: Asking | undefined = useMemo(() => values && {
    models, values, range, raw, zone, scrape: settings.scrape_interval, marks,
  }, [values, models, range, raw, zone, settings, marks]);

  const move = useCallback((by: number, wider = 0) => {
    const span = range.to.valueOf() - range.from.valueOf();
    set({
      from: `${Math.round(range.from.valueOf() + by * span - wider * span)}`,
      to: `${Math.round(range.to.valueOf() + by * span + wider * span)}`,
    });
  }, [range]);

  const renew = useCallback(() => setTick((before) => before + 1), []);
  const rows = useMemo(() => sections(board, (name) => {
    const value = chosen?.values[name] ?? '';
    return value === ALL ? (chosen?.options[name] ?? []).filter((one) => one !== ALL) : value.split(ALSO).filter(Boolean);
  }), [board, chosen]);
  const alone = parameters.get('viewPanel');
  const found = alone === null ? undefined : rows.flatMap(
    ({ own, panels }) => panels.map((placed) => ({ own, placed }))).find(({ placed }) => placed.key === alone);
  // A tab is found by its run, or by what else was chosen first.
  const subject = models.filter((model) => model.type === 'query' && model.name !== 'tenant')
    .map((model) => values?.[model.name]).find((value) => value && value !== ALL);
  useEffect(() => {
    document.title = [subject?.replaceAll(ALSO, ', '), board.title, 'flopwatch'].filter(Boolean).join(' · ');
  }, [subject, board]);
  const kept = new URLSearchParams([...parameters].filter(([name]) => !['refresh', 'viewPanel', 'explore'].includes(name)));
  const others = (
    <Menu>
      {boards.map((one) => (
        <Menu.Item key={one.uid} label={one.title} description={one.description} url={`/d/${one.uid}?${kept}`} />
      ))}
    </Menu>
  );
  return (
    <>
      <header className="bar">
        <h1>
          <Dropdown overlay={others}>
            <ToolbarButton variant="canvas" icon="apps" isOpen={false}>{board.title}</ToolbarButton>
          </Dropdown>
        </h1>
        {models.filter((model) => !['datasource', 'constant'].includes(model.type) && model.hide !== 2).map((model) => (
          <Variable key={model.name} model={model} models={models} chosen={chosen} />
        ))}
        {[...new Map(marks.map(({ name, color }) => [name, color]))].map(([name, color]) => (
          <span key={name} className="variable" title="dashed lines and bars in the charts">
            <i className="key" style={{ background: colors.visualization.getColorByName(color) }} /> {name}
          </span>
        ))}
        <span className="gap" />
        <TimeRangePicker
          value={range} timeZone={zone} onChange={(time) => set({
            from: written(time.raw.from), to: written(time.raw.to) })}
          onChangeTimeZone={(chosen) => set({ timezone: chosen })} onMoveBackward={() => move(-0.5)}
          onMoveForward={() => move(0.5)} onZoom={() => move(0, 0.5)} isOnCanvas
        />
        <RefreshPicker
          value={refresh} intervals={board.timepicker?.refresh_intervals} isOnCanvas
          onIntervalChanged={(interval) => set({ refresh: interval })} onRefresh={renew}
        />
        {theme}
      </header>
      {chosen?.error && <Alert title={chosen.error} severity="error" />}
      {asking && (found ? (
        <Single key={alone} {...found} asking={asking} explored={parameters.has('explore')} />
      ) : rows.map((row) => <Row {...row} key={row.key} asking={asking} />))}
      <Keys move={move} refresh={renew} />
    </>
  );
}

function Variable({ model, models, chosen }: {
  model: VariableModel; models: VariableModel[]; chosen: Chosen | undefined;
}) {
  const value = chosen?.values[model.name] ?? '';
  const [typed, setTyped] = useState<string>();
  const numeric = Number.isFinite(Number.parseFloat(typeof model.query === 'string' ? model.query : ''));
  const invalid = model.type === 'textbox' && numeric && !/^\d+(\.\d+)?$/.test(typed ?? value);
  const change = (to: string) => {
    setTyped(undefined);
    if (to !== value) {
      const dependent = dependents(model, models).map((one) => [`var-${one.name}`, undefined]);
      set({ ...Object.fromEntries(dependent), [`var-${model.name}`]: to });
    }
  };
  return (
    <label className="variable">
      <span>{model.label || model.name}</span>
      {model.type === 'textbox' ? (
        <Input width={10} value={typed ?? value} invalid={invalid} title={invalid ? 'a number is expected' : undefined} onChange={(event) => setTyped(event.currentTarget.value)}
          onBlur={() => typed !== undefined && !invalid && change(typed)}
          onKeyDown={(event) => event.key === 'Enter' && !invalid && change(event.currentTarget.value)} />
      ) : model.multi ? (
        <MultiCombobox width="auto" minWidth={12} value={value ? value.split(ALSO) : []} placeholder="none"
          options={[...new Set([...(chosen?.options[model.name] ?? []), ...value.split(ALSO).filter(Boolean)])].map(
            (one) => ({ value: one, label: one === ALL ? 'All' : one }))}
          onChange={(picked) => {
            const every = picked.map((one) => one.value);
            const newest = every.at(-1);
            change(newest === ALL ? ALL : every.filter((one) => one !== ALL).join(ALSO));
          }} />
      ) : (
        <Combobox width="auto" minWidth={12} value={value || null} placeholder="none"
          options={[...new Set([...(chosen?.options[model.name] ?? []), ...(value ? [value] : [])])].map((one) => ({
            value: one, label: one === ALL ? 'All' : one }))}
          onChange={(option) => change(option.value)} />
      )}
    </label>
  );
}
