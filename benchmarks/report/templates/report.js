// What the pages of the report do: filter the table of verdicts; draw the chart of the chosen case, and follow the
// address (#case=...&run=...). Charts come from Python as JSON; texts of records are only ever put in as text.
"use strict"

const find = (selector) => document.querySelector(selector)
const address = () => new URLSearchParams(location.hash.slice(1))

function setAddress(values) {
  const wanted = new URLSearchParams(Object.entries(values).filter(([, value]) => value))
  history.replaceState(null, "", `#${wanted}`)
}

// The table of verdicts.

function startFilters(form) {
  const rows = [...document.querySelectorAll(".verdicts tbody tr")]
  const selects = [...form.querySelectorAll("select")]
  const folded = [...document.querySelectorAll(".folded")]

  function filter() {
    const wanted = selects.filter((select) => select.value)
    for (const row of rows) row.hidden = wanted.some((select) => row.dataset[select.name] !== select.value)
    const left = rows.filter((row) => !row.hidden)
    for (const part of folded) if (wanted.length) part.open = left.some((row) => part.contains(row))
    find("#count").textContent = `${left.length} of ${rows.length} cases`
  }

  for (const select of selects) select.value = address().get(select.name) ?? ""
  for (const select of selects) if (select.selectedIndex < 0) select.value = ""
  form.addEventListener("change", () => {
    filter()
    setAddress(Object.fromEntries(selects.map((select) => [select.name, select.value])))
  })
  form.addEventListener("reset", () => setTimeout(() => form.dispatchEvent(new Event("change"))))
  form.hidden = false
  filter()
}

// Charts.

const OPTIONS = { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["lasso2d", "select2d"] }

// A chart from its JSON, with the colours of the reader's scheme.
function chart(id) {
  const colours = getComputedStyle(document.documentElement)
  const text = document.getElementById(id).textContent
  return JSON.parse(text.replace(/var\((--[\w-]+)\)/g, (_, name) => colours.getPropertyValue(name).trim()))
}

// A text that Python escaped for Plotly, as lines of plain text.
function lines(text) {
  const characters = { "&lt;": "<", "&gt;": ">", "&amp;": "&" }
  return text.split("<br>").map((line) => line.replace(/&(lt|gt|amp);/g, (entity) => characters[entity]))
}

const escaped = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;")

function element(name, content, href) {
  const made = document.createElement(name)
  made.append(...(Array.isArray(content) ? content : [content]))
  if (href) made.href = href
  return made
}

function startCases(select) {
  const { repository, runs } = JSON.parse(find("#runs").textContent)
  const place = find("#over-runs")
  let days = 0 // before the newest run that are shown; 0 shows all
  let points = [] // of the chosen case: where it is in the chart, its run, the run before it, its words

  const named = ([utc, commit, dirty]) =>
    `${utc.slice(0, 16).replace("T", " ")}, ${commit.slice(0, 7) || "unknown commit"}${dirty ? " + changes" : ""}`
  const known = (commit) => /^[0-9a-f]{7,64}$/.test(commit)

  function commitLink([, commit]) {
    const text = commit.slice(0, 7) || "unknown"
    return repository && known(commit) ? element("a", text, `${repository}/commit/${commit}`) : element("code", text)
  }

  function differenceLink(before, run) {
    if (!before || !before[1] || !run[1] || before[1] === run[1]) return "the same commit"
    const text = `${before[1].slice(0, 7)}...${run[1].slice(0, 7)}`
    if (!repository || !known(before[1]) || !known(run[1])) return element("code", `git diff ${text}`)
    return element("a", text, `${repository}/compare/${before[1]}...${run[1]}`)
  }

  // What changed in the environment between the point's run and the one before it in this series.
  function changed(number, before) {
    const texts = runs.slice(before + 1, number + 1).map((run) => run[3]).filter(Boolean)
    return texts.join("; ")
  }

  function draw() {
    const option = select.selectedOptions[0]
    const figure = chart(`case-${select.selectedIndex}`)
    const trace = figure.data.find((one) => one.meta === "runs")
    points = []
    trace.customdata.forEach((number, index) => {
      if (number === null) return
      const before = points.length ? points.at(-1).number : null
      const said = lines(trace.text[index])
      const news = before === null ? "" : changed(number, before)
      points.push({ index, number, before, said, news })
      trace.text[index] = `${escaped(named(runs[number]))}<br>${trace.text[index]}`
      if (news) trace.text[index] += `<br>changed: ${escaped(news).replaceAll("; ", "<br>")}`
    })
    trace.hovertemplate = "%{text}<extra></extra>"
    trace.selectedpoints = null
    const wanted = points.find((point) => runs[point.number][0] === address().get("run"))
    if (wanted) mark(figure, trace, wanted)
    figure.layout.uirevision = `${select.value} ${days}` // a chosen point leaves the reader's zoom as it is
    if (days) figure.layout.xaxis.range = lastDays(runs[points.at(-1).number][0])
    place.setAttribute("role", "img")
    place.setAttribute("aria-label", `Throughput over the runs: ${option.textContent}. The same points stand in the table below.`)
    Plotly.react(place, figure.data, figure.layout, OPTIONS)
    place.removeAllListeners("plotly_click")
    place.on("plotly_click", ({ points: [clicked] }) => {
      const point = clicked.data.meta === "runs" && points.find((one) => one.index === clicked.pointNumber)
      if (point) choose(runs[point.number][0])
    })
    describe(wanted)
    find("#points").open ? fill() : clear()
    for (const section of document.querySelectorAll(".curves"))
      section.hidden = option.dataset.lengths !== "" && section.id !== `curves-${option.dataset.lengths}`
    drawCurves()
  }

  function lastDays(utc) {
    const day = 86400e3
    return [-days, 1].map((number) => new Date(Date.parse(utc) + number * day).toISOString().slice(0, 19))
  }

  // The chosen run: a line through the chart.
  function mark(figure, trace, point) {
    const at = trace.x[point.index]
    const line = { color: getComputedStyle(document.documentElement).getPropertyValue("--ink").trim(), width: 1.5 }
    figure.layout.shapes.push({ type: "line", x0: at, x1: at, yref: "paper", y0: 0, y1: 1, line })
  }

  function choose(utc) {
    setAddress({ case: select.value, run: utc })
    draw()
  }

  function describe(point) {
    if (!point) return
    const run = runs[point.number]
    const before = point.before === null ? null : runs[point.before]
    const content = [element("p", [element("b", `Run of ${named(run)}`)])]
    content.push(element("p", point.said.join("; ")))
    const links = element("p", ["commit ", commitLink(run)])
    if (before) links.append("; since the run before: ", differenceLink(before, run))
    content.push(links)
    if (point.news) content.push(element("p", `changed in the environment: ${point.news}`))
    find("#chosen").replaceChildren(...content)
  }

  const clear = () => find("#points tbody").replaceChildren()

  function fill() {
    const rows = points.map(({ number, before, said, news }) => {
      const run = runs[number]
      const cells = [run[0].slice(0, 16).replace("T", " "), commitLink(run)]
      cells.push(before === null ? "–" : differenceLink(runs[before], run), said.join("; "), news)
      return element("tr", cells.map((cell) => element("td", cell)))
    })
    find("#points tbody").replaceChildren(...rows.reverse())
  }

  function follow() {
    const wanted = address().get("case")
    const index = [...select.options].findIndex((option) => option.value === wanted)
    if (index >= 0) select.selectedIndex = index
    draw()
  }

  select.addEventListener("change", () => {
    setAddress({ case: select.value })
    draw()
  })
  find("#points").addEventListener("toggle", () => find("#points").open && fill())
  find("#ranges").addEventListener("click", ({ target }) => {
    if (!target.dataset.days) return
    days = Number(target.dataset.days)
    for (const button of find("#ranges").children) button.setAttribute("aria-pressed", button === target)
    draw()
  })
  addEventListener("hashchange", follow)
  follow()
  return draw
}

// Curves over the length are drawn when they come into sight.
const sight = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    if (!isIntersecting) continue
    sight.unobserve(target)
    const { data, layout } = chart(target.dataset.figure)
    Plotly.react(target, data, layout, OPTIONS)
  }
})

function drawCurves() {
  for (const place of document.querySelectorAll(".chart[data-figure]")) {
    sight.unobserve(place)
    sight.observe(place)
  }
}

if (find("#filters")) startFilters(find("#filters"))
if (globalThis.Plotly) {
  const redraw = find("#case") ? startCases(find("#case")) : drawCurves
  if (redraw === drawCurves) drawCurves()
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw)
}
