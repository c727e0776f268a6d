// The address bar holds all state, as in Grafana: /d/UID?from=now-1h&to=now&refresh=30s&var-run=llama.
import { useSyncExternalStore } from 'react';

// Between the values of a variable that has several.
export const ALSO = '\u001f';

const listeners = new Set<() => void>();

function notify(): void {
  listeners.forEach((listener) => listener());
}

window.addEventListener('popstate', notify);

export function go(to: string, replace = false): void {
  if (replace) {
    history.replaceState(null, '', to);
  } else {
    history.pushState(null, '', to);
  }
  notify();
}

// Sets parameters of the address, or takes away those that are undefined.
export function set(parameters: Record<string, string | undefined>, replace = false): void {
  const given = new URLSearchParams(location.search);
  for (const [name, value] of Object.entries(parameters)) {
    if (value === undefined) {
      given.delete(name);
    } else {
      given.delete(name);
      value.split(ALSO).forEach((one) => given.append(name, one));
    }
  }
  go(`${location.pathname}?${given}`, replace);
}

export function useAddress(): { uid: string; parameters: URLSearchParams } {
  const href = useSyncExternalStore(
    (listener) => {
      listeners.add(listener);
      return () => listeners.delete(listener);
    },
    () => location.href
  );
  const url = new URL(href);
  return { uid: /^\/d\/([^/]+)/.exec(url.pathname)?.[1] ?? '', parameters: url.searchParams };
}

// Links between dashboards stay on the page; all others are the browser's.
document.addEventListener('click', (event) => {
  const link = (event.target as Element | null)?.closest?.('a');
  if (!link || event.defaultPrevented || event.button !== 0 || event.ctrlKey || event.metaKey || event.shiftKey) {
    return;
  }
  const url = new URL(link.href, location.href);
  if (url.origin === location.origin && (url.pathname === '/' || url.pathname.startsWith('/d/'))) {
    event.preventDefault();
    go(url.pathname + url.search);
    window.scrollTo(0, 0);
  }
});
