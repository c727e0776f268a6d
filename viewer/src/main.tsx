import './public';
import { createTheme, ThemeContext } from '@grafana/data';
import { initPluginTranslations } from '@grafana/i18n';
import { Alert, ErrorBoundaryAlert, GlobalStyles, PortalContainer, ToolbarButton } from '@grafana/ui';
import { useEffect, useMemo, useState } from 'react';
import { createRoot } from 'react-dom/client';
import { set, useAddress } from './address';
import { Board } from './Board';
import type { BoardModel, BoardSummary, Settings } from './model';
import { inOrder, Index } from './Index';
import { fill } from './registries';
import './style.css';

async function got<T>(path: string): Promise<T> {
  const answer = await fetch(path);
  const body = await answer.json();
  if (!answer.ok) {
    throw new Error(body.detail ?? `${path} answers ${answer.status}`);
  }
  return body;
}

function Page() {
  const { uid, parameters } = useAddress();
  const [boards, setBoards] = useState<BoardSummary[]>([]);
  const [settings, setSettings] = useState<Settings>();
  const [board, setBoard] = useState<BoardModel>();
  const [error, setError] = useState<string>();
  const system = matchMedia('(prefers-color-scheme: light)').matches ? 'light' : 'dark';
  const mode = parameters.get('theme') ?? localStorage.getItem('theme') ?? system;
  const theme = useMemo(() => createTheme({ colors: { mode: mode === 'light' ? 'light' : 'dark' } }), [mode]);

  useEffect(() => {
    got<BoardSummary[]>('/api/boards').then((found) => setBoards(inOrder(found)), (problem: Error) => setError(problem.message));
    got<Settings>('/api/settings').then(setSettings, (problem: Error) => setError(problem.message));
  }, []);
  useEffect(() => {
    let current = true;
    setBoard(undefined);
    setError(undefined);
    document.title = 'flopwatch';
    if (uid) {
      got<BoardModel>(`/api/boards/${encodeURIComponent(uid)}`).then(
        (found) => {
          if (current) {
            setBoard(found);
          }
        },
        (problem: Error) => current && setError(problem.message)
      );
    }
    return () => {
      current = false;
    };
  }, [uid]);

  const other = mode === 'light' ? 'dark' : 'light';
  const change = (
    <ToolbarButton variant="canvas" tooltip={`Use the ${other} theme`}
      onClick={() => {
        localStorage.setItem('theme', other);
        set({ theme: other }, true);
      }}>
      {mode === 'light' ? '☾' : '☀'}
    </ToolbarButton>
  );
  return (
    <ThemeContext.Provider value={theme}>
      <GlobalStyles />
      <PortalContainer />
      <main className={theme.isDark ? 'dark' : 'light'} style={{ background: theme.colors.background.canvas }}>
        {error && <Alert title={error} severity="error" />}
        {(!uid || (error && !board)) && (
          <>
            <header className="bar"><h1>flopwatch</h1><span className="gap" />{change}</header>
            <Index boards={boards} />
          </>
        )}
        {uid && board && settings && (
          <ErrorBoundaryAlert dependencies={[uid, `${parameters}`]}>
            <Board key={uid} board={board} boards={boards} parameters={parameters} settings={settings} theme={change} />
          </ErrorBoundaryAlert>
        )}
      </main>
    </ThemeContext.Provider>
  );
}

fill();
initPluginTranslations('grafana-ui').then(() => createRoot(document.getElementById('root')!).render(<Page />));
