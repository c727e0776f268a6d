import { dateTimeFormat, FieldType, getFieldDisplayName, type DataFrame, type LinkModel } from '@grafana/data';
import { SortOrder, TooltipDisplayMode } from '@grafana/schema';
import {
  getFieldDisplayItems, getFieldDisplayLinks, PanelContextProvider, SeriesVisibilityChangeMode, TimeSeries,
  TooltipPlugin2, usePanelContext, VizTooltipContent, VizTooltipFooter, VizTooltipHeader, VizTooltipWrapper,
  type PanelContext,
} from '@grafana/ui';
import { useMemo, useState } from 'react';
import type { Drawing } from '../model';
import { set } from '../address';
import { at, Marks } from './marks';

const X_ALL = 1; // TooltipHoverMode.xAll, a const enum that is not exported

// What a click on the legend leaves: one series alone, or with Ctrl or Shift one more or less.
function useChoice(frames: DataFrame[]): [DataFrame[], PanelContext] {
  const [chosen, setChosen] = useState<string[]>();
  const around = usePanelContext();
  const [every, first] = useMemo(() => {
    const named = frames.flatMap((frame) => frame.fields.filter((field) => field.type !== FieldType.time)
      .map((field) => ({ name: getFieldDisplayName(field, frame, frames), hidden: field.config.custom?.hideFrom?.viz })));
    return [named.map((one) => one.name), named.filter((one) => !one.hidden).map((one) => one.name)];
  }, [frames]);
  const kept = chosen && every.some((name) => chosen.includes(name)) ? chosen : undefined; // else they are gone
  const shown = useMemo(() => !kept ? frames : frames.map((frame) => ({ ...frame, fields: frame.fields.map((field) => {
    const { custom } = field.config, hidden = !kept.includes(getFieldDisplayName(field, frame, frames));
    return field.type === FieldType.time ? field : { ...field, config: { ...field.config, custom: {
      ...custom, hideFrom: { ...custom?.hideFrom, viz: hidden, tooltip: hidden } } } };
  }) })), [frames, kept]);
  const context = useMemo<PanelContext>(() => ({ ...around, onToggleSeriesVisibility: (label, mode) => {
    const now = kept ?? first;
    if (typeof label !== 'string') {
      setChosen(label ?? undefined);
    } else if (mode === SeriesVisibilityChangeMode.AppendToSelection) {
      setChosen(every.filter((name) => now.includes(name) !== (name === label)));
    } else {
      setChosen(now.length === 1 && now[0] === label ? every : [label]);
    }
  } }), [around, every, first, kept]);
  return [shown, context];
}

export function Lines({ panel, frames, width, height, range, zone, marks }: Drawing) {
  const { legend, tooltip } = panel.options;
  const [shown, context] = useChoice(frames);
  return (
    <PanelContextProvider value={context}>
      <TimeSeries frames={shown} width={width} height={height} timeRange={range} timeZone={zone} legend={legend}
        options={panel.options}>
        {(config, aligned) => {
          const time = aligned.fields.find((field) => field.type === FieldType.time)!;
          return (
            <>
              <Marks config={config} marks={marks} />
              <TooltipPlugin2
                config={config} hoverMode={X_ALL} maxWidth={500}
                queryZoom={({ from, to }) => set({ from: `${Math.round(from)}`, to: `${Math.round(to)}` })}
                getDataLinks={(series, row) => {
                  const field = aligned.fields[series];
                  return field ? (getFieldDisplayLinks(field, row) as LinkModel[]) : [];
                }}
                render={(drawn, rows, series, pinned, _dismiss, _range, _sync, dataLinks) => {
                  const row = rows[0] ?? rows.find((one) => one != null);
                  if (row == null) {
                    return null;
                  }
                  const moment = time.values[row];
                  const items = getFieldDisplayItems(aligned.fields, time, rows, series,
                    tooltip?.mode ?? TooltipDisplayMode.Multi, tooltip?.sort ?? SortOrder.None);
                  const happened = at(marks, drawn, moment).map((mark) => (
                    { label: mark.title, value: mark.text, color: mark.color }));
                  return (
                    <VizTooltipWrapper>
                      <VizTooltipHeader isPinned={pinned}
                        item={{ label: dateTimeFormat(moment, { timeZone: zone }), value: '' }} />
                      <VizTooltipContent items={[...happened, ...items]} isPinned={pinned} scrollable={pinned} />
                      {pinned && dataLinks.length > 0 && (
                        <VizTooltipFooter dataLinks={dataLinks as Array<LinkModel<any>>} />
                      )}
                    </VizTooltipWrapper>
                  );
                }}
              />
            </>
          );
        }}
      </TimeSeries>
    </PanelContextProvider>
  );
}
