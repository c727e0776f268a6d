import { dateTimeFormat, FieldType, getFieldDisplayName, type DataFrame, type LinkModel } from '@grafana/data';
import { SortOrder, TooltipDisplayMode } from '@grafana/schema';
import {
  getFieldDisplayItems, getFieldDisplayLinks, PanelContextProvider, SeriesVisibilityChangeMode, TimeSeries,
  TooltipPlugin2, usePanelContext, VizTooltipContent, VizTooltipFooter, VizTooltipHeader, VizTooltipWrapper,
  type PanelContext,
} from '@grafana/ui';
import { useCallback, useMemo, useState } from 'react';
import type { Drawing } from '.';
import { set } from '../address';
import { at, Marks } from './marks';

type Toggle = NonNullable<PanelContext['onToggleSeriesVisibility']>;

const X_ALL = 1; // TooltipHoverMode.xAll, a const enum that is not exported

// What a click on the legend leaves: one series alone, or with Ctrl or Shift one more or less.
function useChoice(frames: DataFrame[]): [DataFrame[], PanelContext] {
  const [chosen, setChosen] = useState<string[]>();
  const around = usePanelContext();
  const every = useMemo(() => frames.flatMap((frame) => frame.fields.filter((field) => field.type !== FieldType.time)
    .map((field) => getFieldDisplayName(field, frame, frames))), [frames]);
  const shown = useMemo(() => {
    if (!chosen || !every.some((name) => chosen.includes(name))) {
      return frames;
    }
    const hidden = { hideFrom: { viz: true, tooltip: true, legend: false } };
    return frames.map((frame) => ({ ...frame, fields: frame.fields.map((field) => (
      field.type === FieldType.time || chosen.includes(getFieldDisplayName(field, frame, frames)) ? field
        : { ...field, config: { ...field.config, custom: { ...field.config.custom, ...hidden } } })) }));
  }, [frames, every, chosen]);
  const toggle = useCallback<Toggle>((label, mode) => setChosen((before) => {
    if (typeof label !== 'string') {
      return label ?? undefined;
    }
    if (mode !== SeriesVisibilityChangeMode.AppendToSelection) {
      return before?.length === 1 && before[0] === label ? undefined : [label];
    }
    const left = every.filter((name) => (before ?? every).includes(name) !== (name === label));
    return left.length === every.length ? undefined : left;
  }), [every]);
  return [shown, useMemo(() => ({ ...around, onToggleSeriesVisibility: toggle }), [around, toggle])];
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
