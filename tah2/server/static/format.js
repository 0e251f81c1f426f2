// Numbers and tokens as people read them.

const PREFIXES = [[1e18, "E"], [1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"], [1, ""]];
export const SHADES = 5; // deeper tokens wear the last one

export const shade = (depth) => Math.min(Math.max(depth, 1), SHADES);
export const passes = (depth) => `${depth} pass${depth === 1 ? "" : "es"}`;
export const percent = (share) => `${(100 * share).toFixed(share > 0 && share < 0.0995 ? 1 : 0)}%`;

export function si(value) {
  const [size, prefix] = PREFIXES.find(([size]) => value >= size) ?? PREFIXES.at(-1);
  return `${Number((value / size).toPrecision(3))} ${prefix}`;
}

// White space made visible, so that a prediction of it can be read.
export function visible(text) {
  return text === "" ? "∅" : text.replace(/\n/g, "↵").replace(/\t/g, "⇥").replace(/^ +| +$/g, (gap) => "␣".repeat(gap.length));
}

export function countDepths(tokens) {
  const counts = new Map();
  for (const { depth } of tokens) counts.set(depth, (counts.get(depth) ?? 0) + 1);
  return [...counts].sort(([a], [b]) => a - b);
}

export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "text") made.textContent = value;
    else if (value !== undefined) made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}
