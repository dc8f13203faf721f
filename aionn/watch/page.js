// The watch page: asks the server for what is newer, and draws it. No text is ever taken for HTML.
"use strict";
(() => {
  const RETRY_MS = [500, 1000, 2000, 5000];
  const HIDDEN_MS = 2000;
  const SECONDS = 60;
  const SVG = "http://www.w3.org/2000/svg";
  const OUTCOMES = [["on time", "on-time"], ["late", "late"], ["dropped", "dropped"]];
  const STATUS = { on_time: ["on time", "on-time"], late: ["late", "late"], dropped: ["dropped", "dropped"] };

  const $ = id => document.getElementById(id);
  const canvas = $("picture"), caption = $("caption"), state = $("state");
  const pause = $("pause"), drawn = $("drawn"), choice = $("choice");
  let socket = null, attempts = 0, isPaused = false, last = null, chosen = null;
  let have = { stream: -1, picture: 0, figures: 0 };
  let shown = null, isWaiting = false;

  const say = (text, kind) => {
    if (state.textContent !== text) { state.textContent = text; state.className = kind; }
  };
  // A picture that does not change looks like a live one: the line at the top names the sources that deliver nothing.
  const report = () => {
    const away = (last ? last.streams : []).filter(s => s.source && s.source.state && s.source.state !== "live");
    const why = away.map(({ name, source: { state, reason } }) => state === "ended"
      ? `${name} has ended${reason ? `: ${reason}` : ""}`
      : `Nothing comes from ${name}: ${reason || "it is being opened"}`);
    if (isPaused) say("paused", "warn"); else say(why.join("; ") || "live", why.length ? "bad" : "good");
  };
  const make = (name, attributes = {}, text = null) => {
    const element = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text !== null) element.textContent = text;
    return element;
  };
  const ms = value => value === null || value === undefined ? "-" : value.toFixed(value < 10 ? 2 : value < 100 ? 1 : 0);
  const share = value => value >= 0 && value <= 1 ? `${Math.round(100 * value)}\u00a0%` : value.toPrecision(3);
  const found = finding => `${finding.label} ${share(finding.score)}`;

  // The connection: one question, one answer.

  const connect = () => {
    const address = new URL("live", location.href);
    address.protocol = location.protocol === "https:" ? "wss:" : "ws:";
    address.search = location.search;
    socket = new WebSocket(address);
    socket.binaryType = "arraybuffer";
    socket.onopen = () => { attempts = 0; have = { ...have, picture: 0, figures: 0 }; report(); ask(); };
    socket.onmessage = event => receive(event.data).finally(next);
    socket.onclose = () => {
      socket = null;
      isWaiting = false;
      say("No connection to the program: it has ended, or the network is interrupted. Trying again.", "bad");
      setTimeout(connect, RETRY_MS[Math.min(attempts++, RETRY_MS.length - 1)]);
    };
  };
  const ask = () => {
    if (socket === null || socket.readyState !== WebSocket.OPEN || isPaused || isWaiting) return;
    const wanted = document.hidden || chosen === null ? -1 : chosen;
    if (wanted !== -1 && wanted !== have.stream) have = { ...have, stream: wanted, picture: 0 };
    isWaiting = true;
    const picture = wanted === -1 ? 0 : have.picture;
    socket.send(JSON.stringify({ stream: wanted, picture, figures: have.figures }));
  };
  const next = () => {
    isWaiting = false;
    if (document.hidden) setTimeout(ask, HIDDEN_MS); else ask();
  };
  const receive = async data => {
    const length = new DataView(data).getUint32(0);
    const header = JSON.parse(new TextDecoder().decode(new Uint8Array(data, 4, length)));
    if (header.figures) { have.figures = header.number; last = header.figures; showFigures(); }
    if (header.problem) caption.textContent = header.problem;
    if (header.picture && header.stream === chosen) {
      const arrived = performance.now();
      have.picture = header.picture;
      const jpeg = new Uint8Array(data, 4 + length);
      if (!jpeg.length) return;
      const image = await createImageBitmap(new Blob([jpeg], { type: "image/jpeg" }));
      if (shown) shown.image.close();
      shown = { image, header };
      drawPicture();
      describe(header.shot, header.age_ms + performance.now() - arrived);
      canvas.dataset.picture = header.picture;
    }
  };

  // The picture, with the results on it.

  const colour = role => getComputedStyle(document.documentElement).getPropertyValue(`--${role}`).trim();
  const drawPicture = () => {
    if (!shown) return;
    const { image, header } = shown, { width, height } = image;
    canvas.hidden = false;
    canvas.style.aspectRatio = `${width} / ${height}`;
    const scale = window.devicePixelRatio || 1;
    const w = Math.max(1, Math.round(canvas.clientWidth * scale)), h = Math.max(1, Math.round(w * height / width));
    if (canvas.width !== w || canvas.height !== h) { canvas.width = w; canvas.height = h; }
    const to = canvas.getContext("2d");
    to.imageSmoothingQuality = "high";
    to.drawImage(image, 0, 0, w, h);
    if (!drawn.checked) return;
    const role = (STATUS[header.shot.status] || STATUS.on_time)[1], size = Math.round(14 * scale);
    to.font = `${size}px system-ui, sans-serif`;
    to.textBaseline = "top";
    to.lineWidth = 2 * scale;
    let row = 0;
    for (const finding of header.shot.findings) {
      const text = found(finding);
      let x = 6 * scale, y = 6 * scale + row * 1.6 * size;
      if (finding.box) {
        const [left, top, right, bottom] = finding.box;
        to.strokeStyle = colour(role);
        to.strokeRect(left * w, top * h, (right - left) * w, (bottom - top) * h);
        x = left * w; y = Math.max(0, top * h - 1.4 * size);
      } else row += 1;
      const wide = Math.min(to.measureText(text).width + size * .6, w);
      x = Math.max(0, Math.min(x, w - wide)); y = Math.min(y, h - 1.4 * size);
      to.fillStyle = colour("paper");
      to.fillRect(x, y, wide, 1.4 * size);
      to.fillStyle = colour("ink");
      to.fillText(text, x + size * .3, y + size * .2);
    }
  };
  const describe = (shot, age) => {
    const [words] = STATUS[shot.status] || ["-"];
    const what = shot.findings.slice(0, 3).map(found).join(", ");
    const result = shot.status === "dropped" ? "dropped, no result" : `${words}, result after ${ms(shot.latency_ms)} ms`;
    caption.textContent = `Frame ${shot.index}: ${what ? what + "; " : ""}${result}; shown ${ms(age)} ms after its capture`;
    canvas.setAttribute("aria-label", `Newest frame${what ? ": " + what : ""}, ${words}`);
  };

  // The figures.

  const fill = (id, heads, rows) => {
    const table = $(id), [head, body] = [table.tHead, table.tBodies[0]];
    table.hidden = !rows.length;
    const numeric = heads.map((_, i) => rows.length > 0 && rows.every(row => /^[\d.,]*$|^-$/.test(row[i])));
    if (head.rows[0].cells.length !== heads.length) {
      head.rows[0].replaceChildren(...heads.map(name => {
        const cell = document.createElement("th");
        cell.scope = "col"; cell.textContent = name;
        return cell;
      }));
    }
    while (body.rows.length > rows.length) body.deleteRow(-1);
    rows.forEach((row, r) => {
      const line = body.rows[r] || body.insertRow();
      row.forEach((value, c) => {
        const cell = line.cells[c] || line.insertCell();
        const text = String(value), kind = numeric[c] ? "n" : "";
        if (cell.textContent !== text) cell.textContent = text;
        if (cell.className !== kind) { cell.className = kind; head.rows[0].cells[c].className = kind; }
        if (c && cell.dataset.head !== heads[c]) cell.dataset.head = heads[c];
      });
    });
  };
  const showFigures = () => {
    const { title, streams, devices } = last;
    if (document.title !== title) { document.title = title; $("title").textContent = title; }
    const pictured = streams.map((s, i) => [s, i]).filter(([s]) => s.has_pictures);
    if (chosen === null || !pictured.some(([, i]) => i === chosen)) chosen = pictured.length ? pictured[0][1] : null;
    if (choice.options.length !== pictured.length) {
      choice.replaceChildren(...pictured.map(([s, i]) => new Option(s.name, i, false, i === chosen)));
      $("choosing").hidden = pictured.length < 2;
    }
    $("view").hidden = !pictured.length;
    report();
    fill("streams", ["stream", "per s", "on time", "late", "dropped", "p50 ms", "p99 ms", "age ms", "recognised"],
      streams.map(s => [s.name, s.per_second.toFixed(1), s.on_time, s.late, s.dropped + s.lost + (s.source ? s.source.dropped : 0),
        ms(s.recent.p50), ms(s.recent.p99), ms(s.age_ms), s.findings.slice(0, 1).map(found).join("") || "-"]));
    fill("losses", ["stream", "on the way", "damaged", "at the source", "at the deadline", "late"],
      streams.map(s => [s.name, ...(s.source ? [s.source.lost, s.source.corrupt, s.source.dropped] : ["-", "-", "-"]), s.dropped, s.late]));
    const staged = streams.filter(s => Object.keys(s.stages).length);
    fill("stages", ["stream", "wait p50", "wait p99", "device p50", "device p99", "rest p50", "rest p99"],
      staged.map(s => [s.name, ...["wait", "device", "rest"].flatMap(k => s.stages[k] ? [ms(s.stages[k].p50), ms(s.stages[k].p99)] : ["-", "-"])]));
    const live = streams.filter(s => s.source && s.source.state);
    fill("sources", ["source", "state", "for s", "delivered", "opened again", "delay ms", "last problem"],
      live.map(s => [s.name, s.source.state, s.source.since_s.toFixed(0), s.source.delivered, s.source.reconnections,
        ms(s.source.delay_ms), s.source.reason || "-"]));
    const isServed = devices.some(d => d.clients !== null);
    fill("devices", ["device", ...(isServed ? ["clients"] : []), "process", "slots", "waiting", "started", "rejected", "preempted",
      "overran", "why rejected"],
      devices.map(d => {
        const aborted = Object.entries(d.aborted);
        const rejected = d.rejected + aborted.reduce((sum, [, count]) => sum + count, 0);
        return [d.name, ...(isServed ? [d.clients === null ? "-" : d.clients] : []), d.pid === null ? "-" : d.pid, d.slots, d.waiting, d.started, rejected, d.preempted, d.overran,
          [...(d.rejected ? [["on arrival", d.rejected]] : []), ...aborted].map(([why, count]) => `${why}: ${count}`).join("; ") || "-"];
      }));
    for (const id of ["losses", "stages", "sources", "devices"]) $(`${id}-part`).hidden = $(id).hidden;
    showPlots(streams);
  };

  // The plots of the last minute, one pair for each stream. Along x positions are shares of the width, so text keeps its size.

  const HEIGHT = 150, BASE = 128, TOP = 10;
  const at = ago => `${(100 * (SECONDS - ago) / SECONDS).toFixed(2)}%`;
  const frame = (title, levels, most) => {
    const svg = make("svg", { role: "img", "aria-label": title, width: "100%", height: HEIGHT });
    svg.append(make("title", {}, title));
    for (const [value, label] of levels) {
      const y = BASE - (BASE - TOP) * value / most;
      svg.append(make("line", { x1: 0, y1: y, x2: "100%", y2: y }), make("text", { x: -6, y: y + 4, "text-anchor": "end" }, label));
    }
    for (const [ago, label, anchor] of [[60, "60 s ago", "start"], [30, "30 s", "middle"], [0, "now", "end"]])
      svg.append(make("text", { x: at(ago), y: BASE + 17, "text-anchor": anchor }, label));
    return svg;
  };
  const latencyPlot = stream => {
    const points = stream.seconds.filter(s => s[4] !== null), within = stream.within_ms;
    const most = 1.1 * Math.max(1e-3, within || 0, ...points.map(s => s[5]));
    const top = most / 1.1;
    const levels = [[0, "0"], [top, `${ms(top)} ms`]];
    const svg = frame(`Latency of ${stream.name}, last minute: median ${ms(stream.recent.p50)} ms, 99th percentile ${ms(stream.recent.p99)} ms`, levels, most);
    const y = value => (BASE - (BASE - TOP) * value / most).toFixed(1);
    if (within) svg.append(make("line", { x1: 0, y1: y(within), x2: "100%", y2: y(within), class: "deadline" }));
    const inner = make("svg", { width: "100%", height: BASE, viewBox: `0 0 ${SECONDS} ${BASE}`, preserveAspectRatio: "none" });
    for (const [index, role] of [[4, "device-0"], [5, "late"]]) {
      let run = [];
      const flush = () => {
        if (run.length === 1) run.push([run[0][0] + .5, run[0][1]]);
        if (run.length) inner.append(make("polyline", { points: run.map(([x, v]) => `${x},${y(v)}`).join(" "), stroke: `var(--${role})` }));
        run = [];
      };
      let before = null;
      for (const second of points) {
        if (before !== null && before - second[0] > 1) flush();
        run.push([SECONDS - second[0], second[index]]);
        before = second[0];
      }
      flush();
    }
    svg.append(inner);
    return svg;
  };
  const outcomePlot = stream => {
    const most = Math.max(1, ...stream.seconds.map(s => s[1] + s[2] + s[3]));
    const svg = frame(`Results of ${stream.name} by second: ${stream.on_time} on time, ${stream.late} late, ${stream.dropped + stream.lost} dropped`, [[0, "0"], [most, `${most}/s`]], most);
    for (const second of stream.seconds) {
      if (second[0] >= SECONDS) continue;
      let y = BASE;
      OUTCOMES.forEach(([name, role], i) => {
        const count = second[1 + i];
        if (!count) return;
        const tall = (BASE - TOP) * count / most;
        y -= tall;
        const bar = make("rect", { x: at(second[0] + 1), y: y.toFixed(1), width: `${(90 / SECONDS).toFixed(2)}%`, height: tall.toFixed(1), fill: `var(--${role})` });
        bar.append(make("title", {}, `${count} ${name}, ${second[0]} s ago`));
        svg.append(bar);
      });
    }
    return svg;
  };
  const showPlots = streams => {
    const place = $("plots");
    while (place.children.length > 2 * streams.length) place.lastChild.remove();
    streams.forEach((stream, i) => {
      [[latencyPlot, stream.within_ms ? `latency, deadline ${ms(stream.within_ms)} ms` : "latency"], [outcomePlot, "results by second"]].forEach(([draw, what], k) => {
        let figure = place.children[2 * i + k];
        if (!figure) {
          figure = document.createElement("figure");
          const box = document.createElement("div");
          box.className = "plot";
          figure.append(document.createElement("figcaption"), box);
          place.append(figure);
        }
        const text = `${stream.name}: ${what}`;
        if (figure.firstChild.textContent !== text) figure.firstChild.textContent = text;
        figure.lastChild.replaceChildren(draw(stream));
      });
    });
  };

  // The controls.

  pause.onclick = () => {
    isPaused = !isPaused;
    pause.setAttribute("aria-pressed", isPaused);
    if (socket) report();
    ask();
  };
  drawn.onchange = drawPicture;
  choice.onchange = () => { chosen = Number(choice.value); };
  document.addEventListener("visibilitychange", () => { if (!document.hidden) ask(); });
  window.addEventListener("resize", drawPicture);
  connect();
})();
