// The documents of the store: list, add, delete, and how full it is.

import { documentPath, get, request, upload } from "./api.js";
import { $, announce, bytes, counted, h } from "./dom.js";
import { showSource } from "./source.js";

const PAGE = 200;
const FINDABLE = 8; // documents from which on a field to find one is worth its place
let listed = [];
let total = 0;
let onError = () => {};
let limits = { max_file_bytes: Infinity };

export function setUp({ fail, admitted }) {
  onError = fail;
  limits = admitted;
  $("find").addEventListener("input", draw);
  $("more").addEventListener("click", () => load(listed.length));
  for (const id of ["add", "welcome-add"]) $(id).addEventListener("click", () => $("files").click());
  $("files").addEventListener("change", () => {
    add([...$("files").files].map((file) => ({ file, name: file.webkitRelativePath || file.name })));
    $("files").value = "";
  });
  let depth = 0;
  const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
  const show = (change) => { depth = change ? depth + change : 0; document.body.classList.toggle("dropping", depth > 0); };
  addEventListener("dragenter", (event) => hasFiles(event) && show(1));
  addEventListener("dragleave", (event) => hasFiles(event) && show(-1));
  addEventListener("dragover", (event) => hasFiles(event) && event.preventDefault());
  addEventListener("drop", async (event) => {
    if (!hasFiles(event)) return;
    event.preventDefault();
    show(0);
    const entries = [...event.dataTransfer.items].map((item) => item.webkitGetAsEntry?.()).filter(Boolean);
    const files = entries.length ? (await Promise.all(entries.map(walk))).flat()
      : [...event.dataTransfer.files].map((file) => ({ file, name: file.name }));
    add(files);
  });
}

/** The files below a dropped file or folder, with their paths. */
async function walk(entry) {
  if (entry.isFile) {
    const file = await new Promise((resolve, reject) => entry.file(resolve, reject));
    return [{ file, name: entry.fullPath.replace(/^\//, "") }];
  }
  const [reader, found] = [entry.createReader(), []];
  for (;;) {
    const some = await new Promise((resolve, reject) => reader.readEntries(resolve, reject));
    if (!some.length) break;
    found.push(...some.filter((child) => !child.name.startsWith(".")));
  }
  return (await Promise.all(found.map(walk))).flat();
}

/** List again from the first document, or go on behind the last one shown. */
export async function load(offset = 0) {
  const page = await get(`/v1/documents?offset=${offset}&limit=${PAGE}`);
  listed = offset ? [...listed, ...page.documents] : page.documents;
  total = page.total;
  $("total").textContent = total.toLocaleString("en");
  $("over").textContent = ` over ${counted(total, "document")}`;
  $("add").hidden = page.store.read_only;
  $("welcome").hidden = total > 0 || page.store.read_only;
  gauge(page.store);
  draw();
  return page;
}

function gauge({ bytes: taken, chunks, evicted, kv_dtype }) {
  const most = taken.max ?? (taken.disk_free === null ? taken.file : taken.used + taken.disk_free);
  $("gauge").value = most ? taken.used / most : 0;
  $("gauge-value").textContent = taken.max ? `${bytes(taken.used)} of ${bytes(taken.max)}` : bytes(taken.used);
  const gone = evicted ? `, ${counted(evicted, "passage")} computed when needed` : "";
  $("gauge-note").textContent = `${counted(chunks, "passage")} kept as ${kv_dtype}${gone}` +
    (taken.max || taken.disk_free === null ? "" : `; no cap, ${bytes(taken.disk_free)} of disk left`);
}

function draw() {
  const words = $("find").value.toLowerCase();
  $("find").hidden = total < FINDABLE;
  $("more").hidden = listed.length >= total;
  $("list").replaceChildren(...listed.filter(({ doc_id }) => doc_id.toLowerCase().includes(words)).map(row));
}

function row(entry) {
  const cut = entry.doc_id.lastIndexOf("/") + 1;
  const open = h("button", { type: "button", className: "open", onclick: () => showSource(entry), title: entry.metadata.title },
    h("span", { className: "folder" }, entry.doc_id.slice(0, cut)), entry.doc_id.slice(cut));
  const about = `${counted(entry.chunks, "passage")}, ${bytes(entry.bytes)}${entry.pinned ? ", pinned" : ""}`;
  return h("li", {}, open, h("span", { className: "size number" }, about), deleteButton(entry.doc_id));
}

/** Asks once more before it deletes. */
function deleteButton(id) {
  const button = h("button", { type: "button", className: "delete quiet", "aria-label": `Delete ${id}` }, "Delete");
  const relax = () => { button.classList.remove("sure"); button.textContent = "Delete"; };
  button.addEventListener("blur", relax);
  button.addEventListener("click", async () => {
    if (!button.classList.contains("sure")) {
      button.classList.add("sure");
      button.textContent = "Really?";
      announce(`Press again to delete ${id}.`);
      return;
    }
    try {
      await request(documentPath(id), { method: "DELETE" });
      announce(`${id} was deleted.`);
    } catch (error) {
      if (error.status !== 404) onError(error);
    }
    await load().catch(onError);
  });
  return button;
}

/** Send files one after the other, each with its own progress. */
export async function add(files) {
  const rows = files.map(({ file, name }) => uploadRow(name, file.size));
  $("uploads").prepend(...rows.map((entry) => entry.element));
  for (const [i, one] of files.entries()) {
    if (one.file.size > limits.max_file_bytes) {
      rows[i].fail(`larger than the limit of ${bytes(limits.max_file_bytes)}`);
      continue;
    }
    try {
      const job = await upload([one], rows[i].sent);
      rows[i].follow(job, await ended(job, rows[i]));
    } catch (error) {
      rows[i].fail(error.message);
      if (error.status === 401) onError(error);
    }
    await load().catch(onError);
  }
}

async function ended(job, entry) {
  let wait = 150;
  while (job.state === "queued" || job.state === "running") {
    await new Promise((resume) => setTimeout(resume, wait));
    wait = Math.min(1000, wait * 1.3);
    job = await get(`/v1/jobs/${job.id}`);
    entry.state(job.state === "queued" ? "waiting" : `reading, ${counted(job.tokens, "token")} so far`);
  }
  return job;
}

function uploadRow(name, size) {
  const bar = h("progress", { max: 1, value: 0, "aria-label": `Adding ${name}` });
  const state = h("span", { className: "state number" }, bytes(size));
  const element = h("li", {}, h("span", { className: "file" }, name), bar, state);
  const fail = (why) => {
    element.classList.add("failed");
    state.textContent = why.startsWith(`${name}: `) ? why.slice(name.length + 2) : why;
    element.append(h("button", { type: "button", className: "quiet dismiss", "aria-label": `Dismiss ${name}`,
      onclick: () => element.remove() }, "✕"));
    announce(`${name} was not added: ${why}`);
  };
  return {
    element,
    fail,
    sent: (part) => { bar.value = part; if (part === 1) { bar.removeAttribute("value"); state.textContent = "reading"; } },
    state: (text) => { state.textContent = text; },
    follow: (_, job) => {
      const failed = job.documents.failed[0];
      if (job.state !== "done" || failed) return fail(failed?.reason ?? job.error);
      bar.value = 1;
      state.textContent = job.documents.unchanged ? "already there, unchanged" : `added, ${counted(job.tokens, "token")}`;
      announce(`${name} was added.`);
      setTimeout(() => element.remove(), 4000);
    },
  };
}
