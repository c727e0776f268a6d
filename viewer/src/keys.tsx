// Keyboard shortcuts of a board, most of them Grafana's.
import { Modal } from '@grafana/ui';
import { useEffect, useState } from 'react';
import { go, set } from './address';

const KEYS: Array<[string, string]> = [
  ['?', 'show or hide this list'],
  ['v', 'show the panel below the pointer alone, or all panels again'],
  ['e', 'explore the queries of the panel below the pointer'],
  ['Esc', 'show all panels again'],
  ['← →', 'move the time range'],
  ['-', 'zoom out'],
  ['r', 'refresh'],
  ['h', 'list all dashboards'],
];

export function Keys({ move, refresh }: { move: (by: number, wider?: number) => void; refresh: () => void }) {
  const [shown, setShown] = useState(false);
  useEffect(() => {
    const pressed = (event: KeyboardEvent) => {
      const target = event.target as HTMLElement;
      if (event.ctrlKey || event.metaKey || event.altKey || target.closest('input, textarea, [contenteditable], [role=menu]')) {
        return;
      }
      const alone = new URLSearchParams(location.search).has('viewPanel');
      const id = document.querySelector<HTMLElement>('[data-panel]:hover')?.dataset.id;
      const actions: Record<string, () => void> = {
        '?': () => setShown((before) => !before),
        v: () => (alone ? set({ viewPanel: undefined, explore: undefined }) : id && set({ viewPanel: id })),
        e: () => id && set({ viewPanel: id, explore: '1' }),
        Escape: () => alone && set({ viewPanel: undefined, explore: undefined }),
        ArrowLeft: () => move(-0.5),
        ArrowRight: () => move(0.5),
        '-': () => move(0, 0.5),
        r: refresh,
        h: () => go('/'),
      };
      actions[event.key]?.();
    };
    window.addEventListener('keydown', pressed);
    return () => window.removeEventListener('keydown', pressed);
  }, [move, refresh]);
  return shown ? (
    <Modal title="Keyboard shortcuts" isOpen onDismiss={() => setShown(false)}>
      <table className="keys"><tbody>
        {KEYS.map(([key, text]) => <tr key={key}><th>{key}</th><td>{text}</td></tr>)}
      </tbody></table>
    </Modal>
  ) : null;
}
