// One dashboard: its variables, its time and its panels, in rows that can be folded.
import { rangeUtil, type TimeRange } from '@grafana/data';
import { Alert, Combobox, Dropdown, Input, Menu, RefreshPicker, TimeRangePicker, ToolbarButton } from '@grafana/ui';
import { useCallback, useEffect, useMemo, useState } from 'react';
import { set } from './address';
import type { BoardModel, BoardSummary, PanelModel, Settings, VariableModel } from './model';
import { Panel, type Asking } from './Panel';
import type { Mark } from './panels/marks';
import { queryRange } from './prometheus';
import { ALL, choices, filled, legend, steps, type Values } from './variables';

const CELL = 30, GAP = 8; // pixels of Grafana's grid

export interface Moment {
  from: string;
  to: string;
}

function parsed(raw: Moment): TimeRange {
  const one = (text: string) => (/^\d+$/.test(text) ? rangeMoment(Number(text)) : text);
  return rangeUtil.convertRawToRange({ from: one(raw.from) as string, to: one(raw.to) as string }, 'browser');
}

function rangeMoment(milliseconds: number): string {
  return new Date(milliseconds).toISOString();
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

function useVariables(models: VariableModel[], given: Values, range: TimeRange): Chosen | undefined {
  const [chosen, setChosen] = useState<Chosen>();
  const asked = JSON.stringify(given);
  useEffect(() => {
    const stop = new AbortController();
    const choose = async (): Promise<Chosen> => {
      const values: Values = {}, options: Record<string, string[]> = {};
      let error: string | undefined;
      for (const model of models) { // in order: one may depend on those before it
        const wanted = given[model.name];
        if (model.type !== 'query') {
          values[model.name] = wanted ?? (model.type === 'textbox' ? `${model.query}` : 'prometheus');
          continue;
        }
        let found: string[] = [];
        try {
          found = await choices(model, models, values, range, stop.signal);
        } catch (problem) {
          if (stop.signal.aborted) {
            throw problem;
          }
          error = `${(problem as Error).message}`;
        }
        options[model.name] = model.includeAll ? [ALL, ...found] : found;
        values[model.name] = wanted || (model.includeAll ? ALL : found[0] ?? '');
      }
      return { values, options, error };
    };
    choose().then(
      (made) => setChosen((before) => (JSON.stringify(before) === JSON.stringify(made) ? before : made)),
      () => undefined
    );
    return () => stop.abort();
  }, [models, asked, range]);
  return chosen;
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
      const every = (board.annotations?.list ?? []).filter((one) => one.enable !== false && one.target);
      const found = await Promise.all(every.map(async (one) => {
        const at = steps(range, 500, Math.max(scrape, 15));
        const expr = filled(one.target!.expr, models, values, range, at);
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
                from: time * 1000, to: time * 1000, color: one.iconColor,
                title: legend(one.titleFormat, metric, one.name), text: legend(one.textFormat || ' ', metric, ''),
              });
            }
          }
          return made;
        });
      }));
      return found.flat();
    };
    ask().then(setMarks, () => undefined); // without them the panels are still right
    return () => stop.abort();
  }, [board, values, models, range, scrape]);
  return marks;
}

function Section({ heading, panels, asking }: { heading?: PanelModel; panels: PanelModel[]; asking: Asking }) {
  const [folded, setFolded] = useState(false);
  const top = Math.min(...panels.map((panel) => panel.gridPos.y));
  return (
    <>
      {heading && (
        <h2 className="heading">
          <button type="button" aria-expanded={!folded} onClick={() => setFolded(!folded)}>
            {folded ? '▸' : '▾'} {heading.title}
          </button>
        </h2>
      )}
      {!folded && (
        <div className="grid">
          {panels.map((panel) => (
            <div key={panel.id} className="cell" style={{
              gridColumn: `${panel.gridPos.x + 1} / span ${panel.gridPos.w}`,
              gridRow: `${panel.gridPos.y - top + 1} / span ${panel.gridPos.h}`,
              ['--tall' as string]: `${panel.gridPos.h * (CELL + GAP) - GAP}px`,
            }}>
              <Panel panel={panel} asking={asking} />
            </div>
          ))}
        </div>
      )}
    </>
  );
}

export function Board({ board, boards, parameters, settings, theme }: {
  board: BoardModel; boards: BoardSummary[]; parameters: URLSearchParams; settings: Settings; theme: React.ReactNode;
}) {
  const raw: Moment = useMemo(() => ({
    from: parameters.get('from') ?? board.time?.from ?? 'now-1h', to: parameters.get('to') ?? board.time?.to ?? 'now',
  }), [parameters.get('from'), parameters.get('to'), board]);
  const refresh = parameters.get('refresh') ?? board.refresh ?? '';
  const [tick, setTick] = useState(0);
  const range = useMemo(() => parsed(raw), [raw, tick]);
  useEffect(() => {
    if (!refresh || !raw.to.includes('now')) {
      return;
    }
    const timer = setInterval(() => !document.hidden && setTick((before) => before + 1),
      rangeUtil.intervalToMs(refresh));
    return () => clearInterval(timer);
  }, [refresh, raw]);

  const models = useMemo(() => board.templating?.list ?? [], [board]);
  const given: Values = {};
  for (const [name, value] of parameters) {
    if (name.startsWith('var-')) {
      given[name.slice(4)] = value;
    }
  }
  const chosen = useVariables(models, given, range);
  const marks = useMarks(board, chosen, range, settings.scrape_interval);
  const asking: Asking | undefined = useMemo(() => chosen && {
    models, values: chosen.values, range, raw, scrape: settings.scrape_interval, marks,
  }, [chosen, models, range, raw, settings, marks]);

  const move = useCallback((by: number, wider = 0) => {
    const span = range.to.valueOf() - range.from.valueOf();
    set({
      from: `${Math.round(range.from.valueOf() + by * span - wider * span)}`,
      to: `${Math.round(range.to.valueOf() + by * span + wider * span)}`,
    });
  }, [range]);

  const sections: Array<{ heading?: PanelModel; panels: PanelModel[] }> = [];
  for (const panel of board.panels) {
    if (panel.type === 'row') {
      sections.push({ heading: panel, panels: [] });
    } else {
      (sections.at(-1) ?? sections[sections.push({ panels: [] }) - 1]!).panels.push(panel);
    }
  }
  const kept = new URLSearchParams([...parameters].filter(([name]) => name !== 'refresh'));
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
        <Dropdown overlay={others}>
          <ToolbarButton variant="canvas" icon="apps" isOpen={false}>{board.title}</ToolbarButton>
        </Dropdown>
        {models.filter((model) => model.type !== 'datasource' && model.hide !== 2).map((model) => (
          <Variable key={model.name} model={model} chosen={chosen} />
        ))}
        <span className="gap" />
        <TimeRangePicker
          value={range} timeZone="browser" onChange={(time) => set({
            from: written(time.raw.from), to: written(time.raw.to) })}
          onChangeTimeZone={() => undefined} onMoveBackward={() => move(-0.5)} onMoveForward={() => move(0.5)}
          onZoom={() => move(0, 0.5)} isOnCanvas
        />
        <RefreshPicker
          value={refresh} intervals={board.timepicker?.refresh_intervals} isOnCanvas
          onIntervalChanged={(interval) => set({ refresh: interval })} onRefresh={() => setTick(tick + 1)}
        />
        {theme}
      </header>
      {chosen?.error && <Alert title={chosen.error} severity="error" />}
      {asking && sections.map((section, i) => (
        <Section key={section.heading?.id ?? -i} {...section} asking={asking} />
      ))}
    </>
  );
}

function Variable({ model, chosen }: { model: VariableModel; chosen: Chosen | undefined }) {
  const value = chosen?.values[model.name] ?? '';
  const change = (to: string) => set({ [`var-${model.name}`]: to });
  const [typed, setTyped] = useState<string>();
  return (
    <label className="variable">
      <span>{model.label || model.name}</span>
      {model.type === 'textbox' ? (
        <Input width={10} value={typed ?? value} onChange={(event) => setTyped(event.currentTarget.value)}
          onBlur={() => typed !== undefined && change(typed)}
          onKeyDown={(event) => event.key === 'Enter' && change(event.currentTarget.value)} />
      ) : (
        <Combobox width="auto" minWidth={12} value={value || null} placeholder="none"
          options={[...new Set([...(chosen?.options[model.name] ?? []), ...(value ? [value] : [])])].map((one) => ({
            value: one, label: one === ALL ? 'All' : one }))}
          onChange={(option) => change(option.value)} />
      )}
    </label>
  );
}
