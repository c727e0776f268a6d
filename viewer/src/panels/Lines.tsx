import { dateTimeFormat, FieldType, type LinkModel } from '@grafana/data';
import { SortOrder, TooltipDisplayMode } from '@grafana/schema';
import {
  getFieldDisplayItems, getFieldDisplayLinks, TimeSeries, TooltipPlugin2, VizTooltipContent, VizTooltipFooter,
  VizTooltipHeader, VizTooltipWrapper,
} from '@grafana/ui';
import type { Drawing } from '.';
import { set } from '../address';
import { at, Marks } from './marks';

const X_ALL = 1; // TooltipHoverMode.xAll, a const enum that is not exported

export function Lines({ panel, frames, width, height, range, marks }: Drawing) {
  const { legend, tooltip } = panel.options;
  return (
    <TimeSeries frames={frames} width={width} height={height} timeRange={range} timeZone="browser" legend={legend}
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
                    <VizTooltipHeader item={{ label: dateTimeFormat(moment), value: '' }} isPinned={pinned} />
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
  );
}
