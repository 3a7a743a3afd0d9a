// Elements and small formats.

export const $ = (id) => document.getElementById(id);

/** An element with properties (on…: listeners, aria-…, data-… and others with a dash: attributes) and children. */
export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name.startsWith("--")) element.style.setProperty(name, value);
    else if (name.includes("-") || name === "role") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** Tell people who cannot see the page. */
export function announce(text) {
  $("status").textContent = text;
}

export function bytes(n) {
  const units = ["bytes", "kB", "MB", "GB", "TB"];
  let at = 0;
  while (n >= 1000 && at < units.length - 1) { n /= 1000; at += 1; }
  return `${at && n < 100 ? n.toFixed(1) : Math.round(n)} ${units[at]}`;
}

export const counted = (n, noun) => `${n.toLocaleString("en")} ${noun}${n === 1 ? "" : "s"}`;

export const seconds = (ms) => (ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(ms < 10_000 ? 2 : 1)} s`);
