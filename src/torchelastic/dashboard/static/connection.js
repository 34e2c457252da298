// The stream of job states from the server, and the state of that connection.

// Seconds between attempts, and of silence after which the connection counts as lost.
const RETRY = 1;
const LONGEST_RETRY = 10;
const SILENCE = 20;

/**
 * Calls `onPicture` for each job state, and `onState` with "connecting", "open", "lost" or
 * "unreadable".
 *
 * The browser reconnects by itself, but not after an answer other than 200, nor when the server is
 * silent. Every open stream takes one of the browser's few connections to a server, so a hidden tab
 * closes its stream.
 */
export class Connection {
  constructor(url, onPicture, onState) {
    this.url = url;
    this.onPicture = onPicture;
    this.onState = onState;
    this.retry = RETRY;
    this.heard = performance.now();
    /** A running job sends its state every few seconds. */
    this.live = false;
    this.source = null;
    this.timer = null;
    document.addEventListener("visibilitychange", () => this.seen(!document.hidden));
    setInterval(() => this.watch(), 1000);
    this.open();
  }

  open() {
    this.close();
    this.heard = performance.now();
    this.source = new EventSource(this.url);
    this.source.addEventListener("picture", (event) => this.take(event.data));
    this.source.addEventListener("open", () => (this.heard = performance.now()));
    this.source.addEventListener("error", () => this.lost());
  }

  seen(visible) {
    if (visible) {
      this.onState("connecting");
      this.open();
    } else {
      this.close();
    }
  }

  close() {
    clearTimeout(this.timer);
    this.source?.close();
    this.source = null;
  }

  take(data) {
    this.heard = performance.now();
    this.retry = RETRY;
    let picture;
    try {
      picture = JSON.parse(data);
    } catch {
      this.onState("unreadable");
      return;
    }
    this.live = picture.live;
    this.onState("open");
    this.onPicture(picture);
  }

  lost() {
    this.onState("lost");
    if (this.source?.readyState === EventSource.CLOSED) this.again();
  }

  again() {
    this.close();
    this.timer = setTimeout(() => this.open(), this.retry * 1000);
    this.retry = Math.min(LONGEST_RETRY, this.retry * 2);
  }

  watch() {
    const silent = performance.now() - this.heard > SILENCE * 1000;
    if (this.live && silent && this.source?.readyState === EventSource.OPEN) {
      this.onState("lost");
      this.again();
    }
  }
}
