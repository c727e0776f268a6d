// What libraries read when they are loaded, so this comes first.
declare global {
  interface Window {
    __grafana_public_path__?: string;
    __zod_globalConfig?: { jitless: boolean };
  }
}

window.__grafana_public_path__ = '/public/'; // Grafana's components find their icons and fonts there
window.__zod_globalConfig = { jitless: true }; // or it tries whether it may make code of texts, which it may not

export {};
