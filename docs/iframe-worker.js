// Search of pages that are opened as files: browsers start no worker from file://, so a hidden frame with what the theme's search
// uses of a worker stands in for it. mkdocs-material's plugin `offline` would load such a shim from another host.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      // the theme posts its first message at once, before the script in the frame listens
      this.ready = new Promise(resolve => { frame.onload = () => resolve(frame.contentWindow) })
      const scope = `<script>window.postMessage = data => parent.postMessage(data, "*")<\/script>`
      frame.srcdoc = `<body>${scope}<script src="${new URL(url, location)}"><\/script></body>`
      document.body.appendChild(frame)
      addEventListener("message", event => {
        if (event.source === frame.contentWindow) this.dispatchEvent(new MessageEvent("message", { data: event.data }))
      })
    }
    postMessage(data) { this.ready.then(scope => scope.dispatchEvent(new MessageEvent("message", { data }))) }
  }
}
