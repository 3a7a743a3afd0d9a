// One exchange: the question, the canvas while it is denoised, the answer, its sources and its cost.

import { ask } from "./api.js";
import { Canvas } from "./canvas.js";
import { announce, counted, h, seconds } from "./dom.js";
import { showSource } from "./source.js";

const PHASES = { first_stage: "find", draft: "draft", score: "score", load: "load", decode: "decode" };
const PASS_MS = 160; // that a pass stays visible, where passes come faster than the eye follows
const ALL_PASSES_MS = 1200;
const calm = matchMedia("(prefers-reduced-motion: reduce)");

/** Ask, and show everything as it comes. Raises ApiError; an AbortError leaves a note instead. */
export async function exchange(list, question, options, signal) {
  const canvas = new Canvas();
  const said = h("div", { className: "said" }, canvas.element);
  const article = h("article", { className: "answer", "aria-label": `Answer to: ${question}` }, h("h2", {}, question), said);
  article.setAttribute("aria-busy", "true");
  list.prepend(article);
  announce("Looking for sources.");
  let last = 0;
  try {
    for await (const [name, data] of ask(question, options, signal)) {
      if (name === "canvas") {
        const wait = calm.matches ? 0 : Math.min(PASS_MS, ALL_PASSES_MS / data.nfe) - (performance.now() - last);
        if (canvas.steps.length && wait > 0) await new Promise((resume) => setTimeout(resume, wait));
        canvas.add(data);
        last = performance.now();
      } else if (name === "answer") {
        if (canvas.steps.length && !calm.matches) await new Promise((resume) => setTimeout(resume, PASS_MS));
        finish(article, said, canvas, data);
      } else if (name === "error") throw Object.assign(new Error(data.error.message), data.error);
    }
  } catch (error) {
    if (error.name !== "AbortError") {
      article.remove();
      throw error;
    }
    said.replaceChildren("Stopped.");
    said.classList.add("none");
    announce("Stopped.");
  } finally {
    article.removeAttribute("aria-busy");
  }
}

function finish(article, said, canvas, { answer, citations, stats }) {
  const marks = citations.map((citation, i) =>
    h("button", { type: "button", "aria-label": `Source ${i + 1}: ${citation.doc_id}`, onclick: () => showSource(citation) },
      String(i + 1)));
  said.replaceChildren(answer || "(no words)", ...(marks.length ? [h("sup", {}, " ", ...marks)] : []));
  said.classList.toggle("none", !stats.supported);
  article.append(sources(citations, stats), cost(stats));
  const replay = canvas.replay();
  if (replay) article.append(replay);
  const found = citations.length ? counted(citations.length, "source") : "no source";
  announce(`Answer: ${answer}. ${found}.`);
}

function sources(citations, stats) {
  if (!citations.length) {
    return h("p", { className: "dim small" }, stats.chunks.candidates
      ? "The documents do not hold an answer to this, so no source is shown."
      : "No document could be read for this question.");
  }
  return h("ol", { className: "cites", "aria-label": "Sources" }, ...citations.map((citation, i) => {
    const place = citation.page_end ? `pages ${citation.page} to ${citation.page_end}`
      : citation.page ? `page ${citation.page}` : `passage ${citation.ordinal + 1}`;
    return h("li", {}, h("button", { type: "button", className: "cite", onclick: () => showSource(citation) },
      h("span", { className: "at number" }, String(i + 1)),
      h("span", { className: "name" }, citation.doc_id, h("span", {}, place)),
      h("q", {}, citation.quote)));
  }));
}

function cost(stats) {
  const phases = Object.entries(PHASES).filter(([name]) => stats.ms[name] >= 0.5);
  const told = phases.map(([name, word]) => `${word} ${seconds(stats.ms[name])}`).join(", ");
  const bar = h("div", { className: "timings", role: "img", "aria-label": `Time: ${told}` },
    ...phases.map(([name]) => h("span", { className: name, "--ms": stats.ms[name] })));
  const facts = [
    counted(stats.nfe, "pass").replace("passs", "passes"),
    `${counted(stats.chunks.hit, "passage")} from the store${stats.chunks.recomputed ? `, ${stats.chunks.recomputed} computed` : ""}`,
    `${stats.context_tokens + stats.prompt_tokens} tokens read, ${stats.tokens} written`,
  ];
  return h("div", { className: "cost" }, bar, h("div", { className: "facts number" },
    h("b", {}, seconds(stats.ms.total)),
    ...phases.map(([name, word]) => h("span", { className: `key ${name}` }, `${word} ${seconds(stats.ms[name])}`))),
  h("div", { className: "facts number" }, ...facts.map((fact) => h("span", {}, fact)),
    stats.finish_reason === "length" ? h("span", {}, "cut at the longest length") : null));
}
