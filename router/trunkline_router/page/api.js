/** Calls of the router that served this page. Addresses are relative to the page, and no other host is ever called. */

/** @typedef {import("./identity.js").Identity} Identity */

/** A refusal by the router. `status` is that of HTTP. */
export class Refused extends Error {
  /** @param {number} status @param {string} message @param {string} requestId */
  constructor(status, message, requestId) {
    super(message);
    this.status = status;
    this.requestId = requestId;
  }

  /** Whether another key is needed: none or a wrong one was given, or one that may not do this. */
  get needsIdentity() {
    return this.status === 401 || this.status === 403;
  }
}

export class Api {
  /** @param {Identity} identity */
  constructor(identity) {
    this.identity = identity;
  }

  /**
   * @param {string} path  relative to the page, such as "fleet/events"
   * @param {{accept?: string, signal?: AbortSignal}} [options]
   * @returns {Promise<Response>}  of status 2xx; raises Refused, and TypeError without a connection
   */
  async get(path, { accept = "application/json", signal } = {}) {
    return this.#call(path, { headers: { accept }, signal });
  }

  /**
   * @param {string} path
   * @param {object} body  sent as JSON
   * @param {AbortSignal} [signal]
   */
  async post(path, body, signal) {
    const headers = { "content-type": "application/json" };
    return this.#call(path, { method: "POST", headers, body: JSON.stringify(body), signal });
  }

  /** @param {string} path @param {RequestInit & {headers: Record<string, string>}} options */
  async #call(path, options) {
    const response = await fetch(path, {
      ...options,
      headers: { ...options.headers, ...this.identity.headers },
      cache: "no-store",
      credentials: "omit",
      redirect: "error",
      referrerPolicy: "no-referrer",
    });
    if (!response.ok) throw await refusal(response);
    return response;
  }
}

/** @param {Response} response */
async function refusal(response) {
  const requestId = response.headers.get("x-request-id") ?? "";
  const text = await response.text();
  let message = `the router answered ${response.status}`;
  try {
    message = JSON.parse(text)?.error?.message ?? message;
  } catch (error) {
    if (!(error instanceof SyntaxError)) throw error;  // a proxy's own page is no JSON
  }
  return new Refused(response.status, message, requestId);
}
