// The canvas of a diffusion model: text that fills its holes in any order.

import { h } from "./dom.js";

const SHOWN_HOLES = 12;

export class Canvas {
  constructor() {
    this.steps = [];
    this.element = h("span", { className: "canvas waiting", "aria-hidden": "true" });
    this.draw(0);
  }

  add(step) {
    this.steps.push(step);
    this.draw(this.steps.length);
  }

  /** Show what stood there after `n` steps. */
  draw(n) {
    const tokens = new Map();
    this.steps.slice(0, n).forEach((step, index) => {
      step.rows.forEach((row, i) => tokens.set(row, { piece: step.pieces[i], sure: step.confidence[i], index }));
    });
    const rows = [...tokens.keys()].sort((a, b) => a - b);
    const end = rows.find((row) => tokens.get(row).piece === null) ?? Infinity; // the first end-of-answer token
    const blocks = Math.max(1, Math.ceil(((rows.at(-1) ?? 0) + 1) / (this.steps[0]?.block_len ?? SHOWN_HOLES)));
    const length = Math.min(end, Math.max((this.steps[0]?.block_len ?? SHOWN_HOLES) * blocks, 1));
    const parts = [];
    for (let row = 0; row < length; row += 1) {
      const token = tokens.get(row);
      if (!token) parts.push(h("span", { className: "hole", "--at": row % SHOWN_HOLES }));
      else {
        const piece = parts.length ? token.piece : token.piece.trimStart();
        const fresh = token.index === n - 1 ? " new" : "";
        const title = `${Math.round(token.sure * 100)} % sure, pass ${token.index + 1}`;
        parts.push(h("span", { className: `token${fresh}`, "--sure": token.sure, title }, piece));
      }
    }
    this.element.classList.toggle("waiting", n === 0);
    this.element.replaceChildren(...parts);
  }

  /** A slider over the steps. */
  replay() {
    const n = this.steps.length;
    if (!n) return null;
    const label = h("output", { className: "number" }, `pass ${n} of ${n}`);
    const slide = h("input", {
      type: "range", min: 0, max: n, value: n, "aria-label": "Denoising pass shown",
      oninput: () => {
        this.draw(Number(slide.value));
        label.textContent = slide.value === "0" ? "before the first pass" : `pass ${slide.value} of ${n}`;
      },
    });
    slide.value = n;
    this.element.classList.remove("waiting");
    return h("details", { className: "replay" }, h("summary", {}, "How it was denoised"), this.element,
      h("label", {}, slide, label));
  }
}
