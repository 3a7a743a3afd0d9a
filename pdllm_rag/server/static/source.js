// The text of a document around a quotation. Offsets count code points, as the server's do.

import { documentPath, get } from "./api.js";
import { $, counted, h } from "./dom.js";

const AROUND = 3000;

export async function showSource({ doc_id, char_start = 0, char_end = 0, ordinal = null, page = null }) {
  const [dialog, text] = [$("source"), $("source-text")];
  $("source-title").textContent = doc_id;
  $("source-note").textContent = "Loading…";
  text.replaceChildren();
  if (!dialog.open) dialog.showModal();
  const range = { start: Math.max(0, char_start - AROUND), end: char_end + AROUND };
  const draw = async (goToQuote) => {
    let read;
    try {
      read = await get(`${documentPath(doc_id)}?start=${range.start}&end=${range.end}`);
    } catch (error) {
      $("source-note").textContent = error.status === 404 ? "This document is no longer in the store." : error.message;
      return;
    }
    const place = ordinal === null ? [] : [page ? `page ${page}` : `passage ${ordinal + 1}`];
    $("source-note").textContent = [...place, counted(read.chars, "character")].join(", ");
    const chunk = read.chunks.find((entry) => entry.ordinal === ordinal);
    const points = Array.from(read.text);
    const cut = (from, to) => points.slice(Math.max(0, from - read.start), Math.max(0, to - read.start)).join("");
    const mark = h("mark", {}, cut(char_start, char_end));
    const [from, to] = chunk ? [chunk.char_start, chunk.char_end] : [char_start, char_end];
    const earlier = h("button", { className: "quiet", type: "button",
      onclick: () => { range.start = Math.max(0, range.start - 4 * AROUND); draw(false); } }, "Earlier text");
    const later = h("button", { className: "quiet", type: "button",
      onclick: () => { range.end += 4 * AROUND; draw(false); } }, "Later text");
    text.replaceChildren(...(read.start > 0 ? [earlier] : []), cut(read.start, from),
      h("span", { className: "chunk" }, cut(from, char_start), ...(char_end > char_start ? [mark] : []), cut(char_end, to)),
      cut(to, read.end), ...(read.end < read.chars ? [later] : []));
    if (goToQuote && char_end > char_start) mark.scrollIntoView({ block: "center" });
  };
  await draw(true);
  text.focus({ preventScroll: true });
}
