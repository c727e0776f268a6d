// One panel on the whole page, with its queries to change and ask again.
import { Button, TextArea } from '@grafana/ui';
import { useState } from 'react';
import type { PanelModel } from './model';
import { Panel, type Asking } from './Panel';
import { filled, steps } from './variables';

export function Alone({ panel, id, asking, explored }: {
  panel: PanelModel; id: string; asking: Asking; explored: boolean;
}) {
  const [asked, setAsked] = useState(panel);
  const [typed, setTyped] = useState(() => (panel.targets ?? []).map((target) => filled(
    target.expr ?? '', asking.models, asking.values, asking.range,
    steps(asking.range, panel.maxDataPoints ?? 500, asking.scrape))));
  const ask = () => setAsked({ ...panel, targets: panel.targets?.map((target, i) => ({ ...target, expr: typed[i]! })) });
  return (
    <>
      <div className={explored ? 'alone explored' : 'alone'}><Panel panel={asked} id={id} asking={asking} /></div>
      {explored && typed.map((text, i) => (
        <label key={panel.targets![i]!.refId} className="query">
          <span>{panel.targets![i]!.refId}</span>
          <TextArea rows={Math.min(Math.ceil(text.length / 120) + 1, 8)} value={text} spellCheck={false}
            onChange={(event) => {
              const { value } = event.currentTarget;
              setTyped((before) => before.map((one, j) => (j === i ? value : one)));
            }}
            onKeyDown={(event) => event.key === 'Enter' && (event.ctrlKey || event.metaKey) && ask()} />
        </label>
      ))}
      {explored && <Button size="sm" onClick={ask} tooltip="Ctrl and Enter">Run queries</Button>}
    </>
  );
}
