import react from '@vitejs/plugin-react';
import { cpSync, mkdirSync } from 'node:fs';
import { fileURLToPath } from 'node:url';
import { defineConfig, type Plugin } from 'vite';

const here = (path: string) => fileURLToPath(new URL(path, import.meta.url));

// Grafana's components ask its server for their icons and fonts by these paths; one icon is not in its library.
const PUBLIC: Record<string, string> = {
  '@grafana/ui/dist/public/img/icons': 'build/img/icons',
  '../icons/angle-double-left.svg': 'build/img/icons/unicons/angle-double-left.svg',
  '@fontsource/roboto-mono/files/roboto-mono-latin-400-normal.woff2':
    'fonts/roboto/L0xTDF4xlVMF-BfR8bXMIhJHg45mwgGEFl0_3vrtSM1J-gEPT5Ese6hmHSh0mQ.woff2',
  '@fontsource/roboto-mono/LICENSE': 'fonts/roboto/LICENSE',
  'inter-ui/LICENSE.txt': 'fonts/inter/LICENSE.txt',
  ...Object.fromEntries(['Regular', 'Medium', 'Italic', 'MediumItalic'].map(
    (style) => [`inter-ui/web/Inter-${style}.woff2`, `fonts/inter/Inter-${style}.woff2`])),
};

const assets: Plugin = {
  name: 'grafana-public',
  closeBundle() {
    for (const [from, to] of Object.entries(PUBLIC)) {
      const target = here(`./dist/public/${to}`);
      mkdirSync(fileURLToPath(new URL('.', new URL(`file://${target}`))), { recursive: true });
      cpSync(here(`./node_modules/${from}`), target, { recursive: true });
    }
  },
};

// `flopwatch boards` serves dist/; the libraries' licences go into it with the code.
export default defineConfig({
  plugins: [react(), assets],
  // No panel here has a code editor, which would be two thirds of the page.
  resolve: { alias: { 'monaco-editor': here('./src/nothing.ts') } },
  build: { chunkSizeWarningLimit: 4000, license: true },
  server: { proxy: { '/api': 'http://127.0.0.1:9452', '/public': 'http://127.0.0.1:9452' } },
});
