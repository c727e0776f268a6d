// Where panels are: rows with headings, and a copy of a row or a panel for each value of a variable.
import type { BoardModel, PanelModel } from './model';
import type { Values } from './variables';

const COLUMNS = 24;

export interface Placed {
  key: string;
  panel: PanelModel;
  own?: Values; // the value that a copy stands for
}

export interface Section {
  key: string;
  heading?: PanelModel;
  own?: Values;
  panels: Placed[];
}

type Each = (name: string) => string[];

export function sections(board: BoardModel, each: Each): Section[] {
  const found: Array<{ heading?: PanelModel; panels: PanelModel[] }> = [];
  for (const panel of board.panels) {
    if (panel.type === 'row') {
      found.push({ heading: panel, panels: [...(panel.panels ?? [])] });
    } else {
      (found.at(-1) ?? found[found.push({ panels: [] }) - 1]!).panels.push(panel);
    }
  }
  return found.flatMap(({ heading, panels }, i): Section[] => {
    const name = heading?.repeat;
    const values = name ? each(name) : [];
    return name && values.length > 0
      ? values.map((value) => ({
        key: `${heading.id}-${value}`, heading, own: { [name]: value }, panels: placed(panels, each, `-${value}`),
      }))
      : [{ key: `${heading?.id ?? -i}`, heading, panels: placed(panels, each, '') }];
  });
}

function placed(panels: PanelModel[], each: Each, suffix: string): Placed[] {
  let down = 0; // by how much the copies so far move what is below
  const inOrder = [...panels].sort((a, b) => a.gridPos.y - b.gridPos.y || a.gridPos.x - b.gridPos.x);
  return inOrder.flatMap((panel): Placed[] => {
    const { x, y, w, h } = panel.gridPos;
    const name = panel.repeat;
    const values = name ? each(name) : [];
    const at = (left: number, top: number, wide: number) => (
      { ...panel, gridPos: { x: left, y: top + down, w: wide, h } });
    if (!name || values.length === 0) {
      return [{ key: `${panel.id}${suffix}`, panel: down ? at(x, y, w) : panel }];
    }
    const vertical = panel.repeatDirection === 'v';
    const across = vertical ? 1 : Math.min(values.length, panel.maxPerRow ?? 4);
    const wide = vertical ? w : Math.floor(COLUMNS / across);
    const made = values.map((value, i) => ({
      key: `${panel.id}${suffix}-${value}`, own: { [name]: value },
      panel: at(vertical ? x : (i % across) * wide, y + Math.floor(i / across) * h, wide),
    }));
    down += (Math.ceil(values.length / across) - 1) * h;
    return made;
  });
}
