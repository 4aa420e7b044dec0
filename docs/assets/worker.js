// Search runs in a web worker, which browsers do not start for a page that was opened as a file. There, the same script
// runs in a hidden frame instead. Pages that a web server delivers are not changed by this.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.ready = new Promise(loaded => (this.frame.onload = loaded));
      this.frame.srcdoc = `<script>
        postMessage = data => parent.dispatchEvent(new MessageEvent("message", { data, source: window }));
        importScripts = (...urls) => Promise.all(urls.map(url => new Promise(loaded => {
          const script = Object.assign(document.createElement("script"), { src: url, onload: loaded });
          document.head.append(script);
        })));
      </script><script src="${new URL(url, location)}"></script>`;
      addEventListener("message", event => {
        if (event.source !== this.frame.contentWindow) return;
        this.dispatchEvent(new MessageEvent("message", { data: event.data }));
        if (this.onmessage) this.onmessage(event);
      });
      document.body.append(this.frame);
    }
    postMessage(data) {
      this.ready.then(() => {
        const frame = this.frame.contentWindow, event = new frame.MessageEvent("message", { data });
        frame.dispatchEvent(event);
      });
    }
    terminate() {
      this.frame.remove();
    }
  };
}
