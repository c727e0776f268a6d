// All dashboards, with the alerts that each marks and that fire now.
import { Badge, Card } from '@grafana/ui';
import { useEffect, useState } from 'react';
import type { BoardSummary } from './model';
import { query } from './prometheus';

// From the whole to its parts, as in docs/dashboards.md. Others follow.
const ORDER = ['fleet', 'run', 'stragglers', 'goodput', 'gpus', 'gpu', 'fabric', 'node', 'rack', 'monitor'];

export function inOrder(boards: BoardSummary[]): BoardSummary[] {
  const place = ({ uid }: BoardSummary) => {
    const found = ORDER.indexOf(uid.replace(/^flopwatch-/, ''));
    return found < 0 ? ORDER.length : found;
  };
  return [...boards].sort((a, b) => place(a) - place(b));
}

interface State {
  text: string;
  color: 'green' | 'orange' | 'red';
}

// The state of a board over all values of its variables, undefined without marks of alerts.
async function stateOf(board: BoardSummary, signal: AbortSignal): Promise<State | undefined> {
  const marks = ((board.annotations || undefined)?.list ?? []).map((one) => one.target?.expr ?? '');
  const alerts = marks.find((expr) => expr.startsWith('ALERTS{'));
  if (!alerts) {
    return undefined;
  }
  const found = await query(alerts.replace(/=~?"\$\w+"/g, '=~".+"'), Date.now() / 1000, signal);
  const firing = new Map<string, boolean>(); // an alert that fires as critical and as warning is one
  for (const { metric } of found) {
    const { severity, ...incident } = metric;
    const key = JSON.stringify(Object.entries(incident).sort());
    firing.set(key, severity === 'critical' || firing.get(key) === true);
  }
  const critical = [...firing.values()].filter(Boolean).length, other = firing.size - critical;
  const text = [critical && `${critical} critical`, other && `${other} warning`].filter(Boolean).join(', ');
  return { text: text || 'no alert', color: critical ? 'red' : other ? 'orange' : 'green' };
}

export function Index({ boards }: { boards: BoardSummary[] }) {
  const [states, setStates] = useState<Record<string, State | undefined>>({});
  useEffect(() => {
    const stop = new AbortController();
    const ask = () => boards.forEach((board) => stateOf(board, stop.signal).then(
      (state) => !stop.signal.aborted && setStates((before) => ({ ...before, [board.uid]: state })),
      () => !stop.signal.aborted && setStates((before) => ({ ...before, [board.uid]: undefined }))));
    ask();
    const timer = setInterval(ask, 30_000);
    return () => {
      clearInterval(timer);
      stop.abort();
    };
  }, [boards]);
  return (
    <div className="list">
      {inOrder(boards).map((one) => (
        <Card key={one.uid} href={`/d/${one.uid}`} noMargin data-board={one.uid}>
          <Card.Heading>{one.title}</Card.Heading>
          <Card.Description>{one.description}</Card.Description>
          {states[one.uid] && <Card.Tags><Badge {...states[one.uid]!} /></Card.Tags>}
        </Card>
      ))}
    </div>
  );
}
