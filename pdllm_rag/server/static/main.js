// The page: a question at a time, the documents beside it.

import { exchange } from "./answers.js";
import { get } from "./api.js";
import * as documents from "./documents.js";
import { $, announce, h } from "./dom.js";
import * as settings from "./settings.js";

let running = null;
let waiting = null;
let offered = null;

settings.paint();

function fail(error, again = null) {
  if (error.status === 401) {
    settings.open("This server wants a key.");
    return;
  }
  const notice = h("p", { className: "notice", role: "alert" }, sentence(error.message));
  if (again) {
    const button = h("button", { type: "button", onclick: () => { notice.remove(); again(); } }, "Try again");
    notice.append(button);
    if (error.retryAfter) countDown(button, error.retryAfter);
  }
  $("answers").prepend(notice);
}

const sentence = (text) => text.charAt(0).toUpperCase() + text.slice(1);

/** Lets a busy server be asked again when it said it would be free. */
function countDown(button, seconds) {
  button.disabled = seconds > 0;
  button.textContent = seconds > 0 ? `Try again in ${seconds} s` : "Try again";
  if (seconds > 0) setTimeout(() => countDown(button, seconds - 1), 1000);
}

async function send(question) {
  running = new AbortController();
  $("send").textContent = "Stop";
  $("send").classList.add("stop");
  for (const notice of document.querySelectorAll("#answers > .notice")) notice.remove();
  try {
    await exchange($("answers"), question, settings.options(), running.signal);
  } catch (error) {
    if (error.code === "no_documents") $("welcome").hidden = false;
    waiting = error.status === 401 ? question : null;
    fail(error, () => send(question));
  } finally {
    running = null;
    $("send").textContent = "Ask";
    $("send").classList.remove("stop");
  }
}

function grow() {
  const field = $("question");
  field.style.setProperty("height", "auto");
  field.style.setProperty("height", `${field.scrollHeight}px`);
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) { running.abort(); return; }
  const question = $("question").value.trim();
  if (!question) { announce("Write a question first."); $("question").focus(); return; }
  $("question").value = "";
  grow();
  send(question);
});

$("question").addEventListener("input", grow);
$("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing && !running) {
    event.preventDefault();
    $("ask").requestSubmit();
  }
});

addEventListener("keydown", (event) => {
  const isWriting = event.target.closest?.("input, textarea, select, dialog");
  if (event.key === "/" && !isWriting && !event.ctrlKey && !event.metaKey) {
    event.preventDefault();
    $("question").focus();
  } else if (event.key === "Escape" && !document.querySelector("dialog[open]")) {
    if ($("documents").classList.contains("open")) $("close-documents").click();
    else running?.abort();
  }
});

$("open-documents").addEventListener("click", () => { $("documents").classList.add("open"); $("close-documents").focus(); });
$("close-documents").addEventListener("click", () => { $("documents").classList.remove("open"); $("open-documents").focus(); });
for (const button of document.querySelectorAll("[data-close]")) {
  button.addEventListener("click", () => button.closest("dialog").close());
}
for (const dialog of document.querySelectorAll("dialog")) {
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close()); // beside it
}

async function begin() {
  try {
    const [model] = (await get("/v1/models")).data;
    offered = Object.assign(offered ?? {}, model.pdllm.limits);
    settings.offer(model.pdllm);
    $("model").textContent = model.id;
    await documents.load();
    if (waiting) { const question = waiting; waiting = null; send(question); }
  } catch (error) {
    fail(error, begin);
  }
}

offered = {};
settings.setUp(begin);
documents.setUp({ fail, admitted: offered });
begin();
