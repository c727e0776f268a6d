// What stat, gauge and bar gauge have in common: one value of each series, and the links of that value.
import {
  getDisplayValueAlignmentFactors, getFieldDisplayValues, VizOrientation, type FieldDisplay,
} from '@grafana/data';
import { DataLinksContextMenu, measureText, useTheme2, VizRepeater } from '@grafana/ui';
import type { JSX, MouseEventHandler } from 'react';
import type { Drawing } from '../model';

export interface One {
  value: FieldDisplay;
  width: number;
  height: number;
  count: number;
  factors: ReturnType<typeof getDisplayValueAlignmentFactors>;
  onClick?: MouseEventHandler<HTMLElement>;
}

// The names have the room of the widest one, which is not always the one with most letters.
function alignment(values: FieldDisplay[]): One['factors'] {
  const wide = (text: string) => measureText(text, 14).width;
  const titles = values.map((value) => value.display.title ?? '');
  return {
    ...getDisplayValueAlignmentFactors(values),
    title: titles.reduce((widest, title) => (wide(title) > wide(widest) ? title : widest), ''),
  };
}

export function Values({ drawing, sparkline, orientation, draw, ...layout }: {
  drawing: Drawing;
  sparkline?: boolean;
  orientation?: VizOrientation;
  autoGrid?: boolean;
  itemSpacing?: number;
  minVizHeight?: number;
  maxVizHeight?: number;
  draw: (one: One) => JSX.Element;
}) {
  const theme = useTheme2();
  const { panel, frames, width, height, replaceVariables, zone } = drawing;
  const getValues = () => getFieldDisplayValues({
    data: frames, fieldConfig: panel.fieldConfig!, reduceOptions: panel.options.reduceOptions, replaceVariables, theme,
    sparkline, timeZone: zone,
  });
  return (
    <VizRepeater<FieldDisplay, One['factors']>
      source={frames} renderCounter={0} getValues={getValues} width={width} height={height}
      getAlignmentFactors={alignment} orientation={orientation ?? VizOrientation.Auto}
      itemSpacing={8} {...layout}
      renderValue={({ value, width, height, count, alignmentFactors: factors }) => {
        const one = { value, width, height, count, factors };
        if (!value.hasLinks || !value.getLinks) {
          return draw(one);
        }
        return (
          <DataLinksContextMenu links={value.getLinks}>
            {({ openMenu }) => draw({ ...one, onClick: openMenu })}
          </DataLinksContextMenu>
        );
      }}
    />
  );
}
