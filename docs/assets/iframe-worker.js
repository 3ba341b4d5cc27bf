/* The search runs in a worker, and browsers start no worker for a page opened from disk. There, and only there, a hidden
   frame takes its place: it has a global scope of its own, and both sides hear each other's messages. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.onmessage = null
      this.onerror = null
      this.waiting = []
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.documentElement.append(this.frame)
      const scope = this.frame.contentWindow
      scope.postMessage = data => this.deliver(() => this, data)
      scope.importScripts = () => { throw new Error("importScripts is not for pages opened from disk") }
      const script = scope.document.createElement("script")
      script.src = new URL(url, document.baseURI)
      script.onerror = error => this.onerror && this.onerror(error)
      script.onload = () => {
        const waiting = this.waiting
        this.waiting = null
        waiting.forEach(data => this.postMessage(data))
      }
      scope.document.body.append(script)
    }

    postMessage(data) {
      if (this.waiting) this.waiting.push(data)
      else this.deliver(() => this.frame && this.frame.contentWindow, data)
    }

    /* Later and as a copy, as between real workers: either side may change what it was given. */
    deliver(whom, data) {
      const event = new MessageEvent("message", { data: structuredClone(data) })
      setTimeout(() => {
        const target = whom()
        if (target === this && this.onmessage) this.onmessage(event)
        if (target) target.dispatchEvent(event)
      })
    }

    terminate() {
      if (this.frame) this.frame.remove()
      this.frame = null
    }
  }
}
