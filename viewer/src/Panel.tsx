// One panel: runs its queries, lets Grafana's libraries transform and format the frames, and has them drawn.
import {
  applyFieldOverrides, cacheFieldDisplayNames, FieldColorModeId, getFieldSeriesColor, LoadingState,
  standardFieldConfigEditorRegistry, transformDataFrame, type DataFrame, type InterpolateFunction, type TimeRange,
} from '@grafana/data';
import { ErrorBoundaryAlert, Menu, Modal, PanelChrome, useTheme2 } from '@grafana/ui';
import { useEffect, useMemo, useRef, useState } from 'react';
import { lastValueFrom } from 'rxjs';
import { seriesFrames, tableFrame } from './frames';
import type { Mark, Moment, PanelModel, VariableModel } from './model';
import { PANELS } from './panels';
import { query, queryRange } from './prometheus';
import { csv, download } from './csv';
import { set } from './address';
import { useSeen, useSize } from './size';
import { filled, linked, steps, type Values } from './variables';

export interface Asking {
  models: VariableModel[];
  values: Values;
  range: TimeRange;
  raw: Moment;
  scrape: number;
  marks: Mark[];
  zone: string;
}

interface Answer {
  frames: DataFrame[];
  error?: string;
  done: boolean;
  asked?: boolean; // once at least
}

const NO_FIELDS = { defaults: {}, overrides: [] };

// A panel out of sight is not asked about: a board has many, and a Prometheus much to do.
function useAnswer(panel: PanelModel, asking: Asking, seen: boolean): Answer {
  const [answer, setAnswer] = useState<Answer>({ frames: [], done: false });
  const { models, values, raw, range, scrape } = asking;
  const question = useMemo(() => ({}), [panel, models, values, range, scrape]);
  const under = useRef<{ question: object; stop: AbortController }>(undefined);
  useEffect(() => () => under.current?.stop.abort(), [question]);
  useEffect(() => {
    if (!seen || under.current?.question === question) {
      return; // what went out of sight under way is answered all the same
    }
    const stop = new AbortController();
    under.current = { question, stop };
    const at = steps(range, panel.maxDataPoints ?? 500, scrape);
    const end = range.to.valueOf() / 1000;
    const last = Math.floor(end / at.step) * at.step;
    const first = Math.floor(range.from.valueOf() / 1000 / at.step) * at.step;
    const ask = async (): Promise<DataFrame[]> => {
      const targets = (panel.targets ?? []).filter((target) => !target.hide);
      if (targets.some((target) => !target.expr)) {
        throw new Error('only queries of Prometheus are asked here');
      }
      if (targets.some((target) => target.format === 'heatmap')) {
        throw new Error('a heatmap of buckets is not drawn here');
      }
      const found = await Promise.all(targets.map((target) => {
        const expr = filled(target.expr, models, values, range, at);
        return target.instant ? query(expr, end, stop.signal) : queryRange(expr, first, last, at.step, stop.signal);
      }));
      const answered = found.filter((series) => series.length > 0).length;
      const frames = targets.flatMap((target, i) => {
        const series = found[i]!;
        if (series.length === 0) {
          return [];
        }
        return target.format === 'table' ? [tableFrame(target, series, answered === 1)]
          : seriesFrames({ ...target, legendFormat: linked(target.legendFormat ?? '', values, raw) }, series, at.step);
      });
      const changes = panel.transformations ?? [];
      return changes.length ? lastValueFrom(transformDataFrame(changes, frames)) : frames;
    };
    setAnswer((before) => ({ ...before, done: false }));
    ask().then(
      (frames) => {
        if (!stop.signal.aborted) {
          setAnswer({ frames, done: true, asked: true });
        }
      },
      (error: Error) => {
        if (!stop.signal.aborted) {
          setAnswer({ frames: [], error: error.message, done: true, asked: true });
        }
      }
    );
  }, [question, seen]);
  return answer;
}

export function Panel({ panel, id, asking }: { panel: PanelModel; id: string; asking: Asking }) {
  const theme = useTheme2();
  const [ref, size] = useSize();
  const seen = useSeen(ref);
  const answer = useAnswer(panel, asking, seen);
  const [asked, setAsked] = useState(false);
  const { raw, values, models, range, scrape, zone } = asking;
  const replaceVariables = useMemo(
    (): InterpolateFunction => (text, scoped, format) => linked(text, values, raw, scoped, format), [values, raw]);
  const frames = useMemo(() => {
    const made = applyFieldOverrides({
      data: answer.frames, fieldConfig: panel.fieldConfig ?? NO_FIELDS, replaceVariables, theme, timeZone: zone,
      fieldConfigRegistry: standardFieldConfigEditorRegistry,
    });
    cacheFieldDisplayNames(made);
    // Grafana's chart gives a line the color of its name, but the join of the frames may lose the name.
    for (const field of made.flatMap((frame) => frame.fields)) {
      if (field.config.color?.mode === FieldColorModeId.PaletteClassicByName) {
        const fixedColor = getFieldSeriesColor(field, theme).color;
        field.config = { ...field.config, color: { mode: FieldColorModeId.Fixed, fixedColor } };
      }
    }
    return made;
  }, [answer.frames, panel, replaceVariables, theme, zone]);

  const Drawn = PANELS[panel.type];
  const empty = !frames.some((frame) => frame.length > 0 && frame.fields.length > 0);
  const error = answer.error ?? (Drawn ? undefined : `no way to draw a panel of type ${panel.type}`);
  const nothing = panel.fieldConfig?.defaults.noValue;
  const state = error ? 'error' : !answer.done ? (seen ? 'loading' : 'unseen') : empty ? 'empty' : 'ok';
  const title = replaceVariables(panel.title);
  const menu = (
    <Menu>
      <Menu.Item label="View" icon="eye" shortcut="v" onClick={() => set({ viewPanel: id, explore: undefined })} />
      <Menu.Item label="Explore" icon="compass" shortcut="e" onClick={() => set({ viewPanel: id, explore: '1' })} />
      <Menu.Item label="Queries" icon="search" onClick={() => setAsked(true)} />
      <Menu.Item label="CSV" icon="download-alt" disabled={empty} onClick={() => download(title, csv(frames))} />
    </Menu>
  );
  return (
    <section ref={ref} className="panel" data-panel={panel.title} data-type={panel.type} data-state={state}
      data-nothing={nothing} data-id={id}>
      {size.width > 0 && (
        <PanelChrome
          title={title} description={panel.description} width={size.width} height={size.height}
          menu={menu} statusMessage={error}
          loadingState={answer.done || !seen ? LoadingState.Done : LoadingState.Loading}
        >
          {(width, height) => {
            if (error || (empty && answer.asked)) {
              return <p className="nothing">{error ?? nothing ?? 'No data'}</p>;
            }
            if (empty || !Drawn) {
              return null;
            }
            return (
              <ErrorBoundaryAlert dependencies={[frames]}>
                <Drawn panel={panel} frames={frames} width={width} height={height} range={range} zone={zone}
                  marks={asking.marks} replaceVariables={replaceVariables} />
              </ErrorBoundaryAlert>
            );
          }}
        </PanelChrome>
      )}
      {asked && (
        <Modal title={panel.title} isOpen onDismiss={() => setAsked(false)}>
          {(panel.targets ?? []).map((target) => (
            <pre key={target.refId}>
              {filled(target.expr ?? '', models, values, range, steps(range, panel.maxDataPoints ?? 500, scrape))}
            </pre>
          ))}
        </Modal>
      )}
    </section>
  );
}
