// Requests to the server, with the key of this tab.

const KEY = "pdllm-key";

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

/** What the server refused, or that it could not be reached (status 0). */
export class ApiError extends Error {
  constructor(status, error, retryAfter = null) {
    super(error?.message ?? `the server answered with status ${status}`);
    Object.assign(this, { status, code: error?.code ?? "", retryAfter });
  }
}

const authorization = () => (key.get() ? { Authorization: `Bearer ${key.get()}` } : {});

export async function request(path, { method = "GET", json, signal } = {}) {
  const headers = { ...authorization(), ...(json === undefined ? {} : { "Content-Type": "application/json" }) };
  let response;
  try {
    response = await fetch(path, { method, headers, signal, body: json === undefined ? undefined : JSON.stringify(json) });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, { message: "The server cannot be reached.", code: "unreachable" });
  }
  if (!response.ok) {
    const body = await response.json().catch(() => null);
    throw new ApiError(response.status, body?.error, Number(response.headers.get("Retry-After")) || null);
  }
  return response;
}

export const get = async (path) => (await request(path)).json();

export const documentPath = (id) => `/v1/documents/${encodeURIComponent(id)}`;

/** The server-sent events of a question: [name, data] each. */
export async function* ask(question, options, signal) {
  const response = await request("/v1/qa", { method: "POST", json: { ...options, question, stream: true }, signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read().catch((error) => {
      if (error.name === "AbortError") throw error;
      throw new ApiError(0, { message: "The connection broke off.", code: "unreachable" });
    });
    if (done) return;
    held += value;
    const blocks = held.split("\n\n");
    held = blocks.pop();
    for (const block of blocks) {
      const fields = Object.fromEntries(block.split("\n").map((line) => line.split(/: (.*)/s)));
      yield [fields.event, JSON.parse(fields.data)];
    }
  }
}

/** Send files; `progress` is told the part sent, 0 to 1. Gives the job. */
export function upload(files, progress) {
  return new Promise((resolve, reject) => {
    const form = new FormData();
    for (const { file, name } of files) form.append("file", file, name);
    const sending = new XMLHttpRequest();
    sending.open("POST", "/v1/documents");
    for (const [name, value] of Object.entries(authorization())) sending.setRequestHeader(name, value);
    sending.responseType = "json";
    sending.upload.onprogress = (event) => event.lengthComputable && progress(event.loaded / event.total);
    sending.onerror = () => reject(new ApiError(0, { message: "The server cannot be reached.", code: "unreachable" }));
    sending.onload = () =>
      sending.status === 202 ? resolve(sending.response) : reject(new ApiError(sending.status, sending.response?.error));
    sending.send(form);
  });
}
