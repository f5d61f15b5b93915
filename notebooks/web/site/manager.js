/* The widget manager of the page: models and views, and the messages between them and the widgets in the worker.

   It implements what the models and views of @jupyter-widgets/base ask of a manager (IWidgetManager there). */

/** One end of a comm; `post` sends to the worker, calls back when the worker has handled it, and returns its id. */
class Comm {
  constructor(id, post) {
    this.comm_id = id;
    this.target_name = "jupyter.widget";
    this.post = post;
    this.onMessage = async () => {};
    this.onClose = () => {};
  }

  on_msg(callback) { this.onMessage = callback; }
  on_close(callback) { this.onClose = callback; }
  open() {}
  close() {}

  send(data, callbacks, _metadata, buffers) {
    return this.post(this.comm_id, data, buffers ?? [], () => {
      callbacks?.iopub?.status?.({ content: { execution_state: "idle" } });
    });
  }
}

export class Manager {
  constructor(worker, classOf) {
    this.worker = worker;
    this.classOf = classOf;
    this.models = new Map();
    this.comms = new Map();
    this.waiting = new Map();
    this.sent = 0;
    this.turn = Promise.resolve();
    this.recorded = new Set(); // messages that were taken from the record, as text
    this.isOutdated = false; // whether a recorded model turned out to be of another class
  }

  /** Handle messages that were recorded when the page was built; the worker sends the same when it has started. */
  restore(messages) {
    for (const text of messages) {
      this.recorded.add(text);
      this.enqueue(JSON.parse(text), []);
    }
  }

  /** The worker has opened the panel of these recorded messages; what it sends from now on is new. */
  forget(messages) {
    messages.forEach((text) => this.recorded.delete(text));
  }

  /** Handle a message of the worker. Messages are handled one after another, in the order in which they were sent. */
  take({ comm: text, buffers, cause }) {
    if (this.recorded.delete(text)) return; // the page has handled it already
    this.enqueue(JSON.parse(text), buffers, cause);
  }

  enqueue(message, buffers, cause) {
    this.turn = this.turn.then(() => this.handle(message, buffers, cause)).catch((error) => console.error(error));
  }

  /** A model drops the echo of a value that has changed since: it knows it by the id of the message that caused it. */
  async handle({ type, comm_id: id, data, metadata }, buffers, cause) {
    if (type === "comm_open") return this.open(id, data, buffers);
    if (type === "comm_msg") {
      return this.comms.get(id)?.onMessage({ content: { data }, metadata, buffers, parent_header: { msg_id: cause } });
    }
    this.comms.get(id)?.onClose({ content: { data } });
    this.comms.delete(id);
    this.models.delete(id);
  }

  async open(id, { state, buffer_paths: paths = [] }, buffers) {
    paths.forEach((path, index) => put(state, path, buffers[index]));
    const known = await this.models.get(id);
    if (known?.get("_model_name") === state._model_name) {
      return known.set_state(await known.constructor._deserialize_state(state, this));
    }
    this.isOutdated ||= Boolean(known);
    const comm = new Comm(id, (...message) => this.send(...message));
    this.comms.set(id, comm);
    const Model = this.classOf(state._model_module, state._model_name);
    const made = Model._deserialize_state(state, this)
      .then((values) => new Model(values, { widget_manager: this, model_id: id, comm }));
    this.models.set(id, made);
    return made;
  }

  send(comm, data, buffers, whenDone) {
    const id = ++this.sent;
    this.waiting.set(id, whenDone);
    this.worker.postMessage({ comm, text: JSON.stringify(data), buffers, id });
    document.body.classList.add("computing");
    return id;
  }

  /** The worker has handled the message `id`, and everything that it sent before is in the queue. */
  done(id) {
    const whenDone = this.waiting.get(id);
    this.waiting.delete(id);
    document.body.classList.toggle("computing", this.waiting.size > 0);
    this.turn = this.turn.then(whenDone).catch((error) => console.error(error));
  }

  async get_model(id) {
    if (!this.models.has(id)) throw new Error(`unknown widget ${id}`);
    return this.models.get(id);
  }

  has_model(id) { return this.models.has(id); }
  callbacks() { return {}; }
  setViewOptions(options = {}) { return options; }
  resolveUrl(url) { return Promise.resolve(url); }
  inline_sanitize(text) { return text; }

  async create_view(model, options = {}) {
    model.state_change = model.state_change.then(async () => {
      const View = this.classOf(model.get("_view_module"), model.get("_view_name"));
      const view = new View({ model, options: this.setViewOptions(options) });
      view.listenTo(model, "destroy", view.remove);
      await view.render();
      view.once("remove", () => delete model.views?.[view.cid]);
      return view;
    });
    const made = model.state_change;
    const view = await made;
    if (model.views) model.views[view.cid] = made;
    return view;
  }

  /** Show the widget with this model in `place`. */
  async show(id, place) {
    await this.turn;
    const view = await this.create_view(await this.get_model(id));
    let Widget = view.luminoWidget.constructor;
    while (!Object.hasOwn(Widget, "attach")) Widget = Object.getPrototypeOf(Widget);
    Widget.attach(view.luminoWidget, place);
    new ResizeObserver(() => view.luminoWidget.processMessage(Widget.ResizeMessage.UnknownSize)).observe(place);
    return view;
  }
}

function put(state, path, buffer) {
  const last = path.at(-1);
  path.slice(0, -1).reduce((inner, key) => inner[key], state)[last] = buffer;
}
