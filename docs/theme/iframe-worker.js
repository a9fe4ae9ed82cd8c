/* Search in pages that are opened as files, for which browsers run no workers: the search's script runs in a hidden frame.
   The theme would load such a script from another server; it recognizes this one by its name. */
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      this.waiting = [];
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.addEventListener("load", () => this.start(frame, new URL(url, document.baseURI)), { once: true });
      document.body.append(frame);
    }

    /* Run a script in the frame, which answers by the names that a worker has. */
    start(frame, url) {
      const inside = frame.contentWindow;
      const load = (address) =>
        new Promise((resolve, reject) => {
          const script = frame.contentDocument.createElement("script");
          Object.assign(script, { src: address, onload: resolve, onerror: reject });
          frame.contentDocument.head.append(script);
        });
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      inside.importScripts = async (...addresses) => {
        for (const address of addresses) await load(address);
      };
      load(url).then(() => {
        this.inside = inside;
        this.waiting.splice(0).forEach((data) => this.postMessage(data));
      });
    }

    postMessage(data) {
      if (this.inside) this.inside.dispatchEvent(new MessageEvent("message", { data }));
      else this.waiting.push(data);
    }
  };
  window.Worker = window.IFrameWorker;
}
