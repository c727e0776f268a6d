// Annotations: what happened when, as lines through a chart and a bar below it.
import { useTheme2, type UPlotConfigBuilder } from '@grafana/ui';
import { useLayoutEffect, useRef } from 'react';
import type uPlot from 'uplot';
import type { Mark } from '../model';

export function Marks({ config, marks }: { config: UPlotConfigBuilder; marks: Mark[] }) {
  const theme = useTheme2();
  const plot = useRef<uPlot>(null);
  const now = useRef(marks);
  now.current = marks;
  useLayoutEffect(() => {
    config.setPadding([null, 26, null, null]); // room for half of the last time below the chart
    config.addHook('init', (made) => {
      plot.current = made;
    });
    config.addHook('draw', (drawn) => {
      const { ctx, bbox } = drawn;
      ctx.save();
      ctx.beginPath();
      ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height + 6);
      ctx.clip();
      for (const mark of now.current) {
        const from = drawn.valToPos(mark.from, 'x', true), to = drawn.valToPos(mark.to, 'x', true);
        ctx.strokeStyle = ctx.fillStyle = theme.visualization.getColorByName(mark.color);
        ctx.setLineDash([4, 4]);
        ctx.lineWidth = 1;
        ctx.beginPath();
        ctx.moveTo(from, bbox.top);
        ctx.lineTo(from, bbox.top + bbox.height);
        ctx.stroke();
        ctx.fillRect(from - 2, bbox.top + bbox.height, Math.max(to - from, 4), 4);
      }
      ctx.restore();
    });
  }, [config, theme]);
  useLayoutEffect(() => plot.current?.redraw(), [marks]);
  return null;
}

// The marks at a moment, for a tooltip: within some pixels of it.
export function at(marks: Mark[], drawn: uPlot, time: number): Mark[] {
  const near = Math.abs(drawn.posToVal(4, 'x') - drawn.posToVal(0, 'x'));
  return marks.filter((mark) => mark.from - near <= time && time <= mark.to + near);
}
