#include "fsdp/train/report/report_parts.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <vector>

#include "fsdp/base/text.h"
#include "fsdp/train/log/console_tables.h"
#include "fsdp/train/log/utf8_text.h"
#include "fsdp/train/report/line_chart.h"

namespace fsdp::train {

namespace {

std::string size_text(int64_t bytes) { return html_text(bytes_text(static_cast<double>(bytes))); }

// A sum is known if all of its parts are.
MemoryRow total_of(std::span<const MemoryRow> rows, bool is_on_host) {
  MemoryRow total{.kind = is_on_host ? "total on the host" : "total",
                  .forecast_bytes = 0,
                  .measured_bytes = 0,
                  .is_on_host = is_on_host};
  const auto add = [](int64_t& sum, int64_t bytes) {
    sum = sum == kUnknownBytes || bytes == kUnknownBytes ? kUnknownBytes : sum + bytes;
  };
  for (const MemoryRow& row : rows) {
    if (row.is_on_host != is_on_host) continue;
    add(total.forecast_bytes, row.forecast_bytes);
    add(total.measured_bytes, row.measured_bytes);
  }
  return total;
}

std::string percent_text(int64_t part, int64_t whole) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.2f%%",
                100 * static_cast<double>(part) / static_cast<double>(std::max<int64_t>(whole, 1)));
  return text.data();
}

// A bar for the measured bytes, and a rule at the forecast.
std::string memory_row_html(const MemoryRow& row, int64_t longest, const char* css_class) {
  std::string track;
  std::string words;
  if (row.measured_bytes != kUnknownBytes) {
    track += concat("<i style=\"width:", percent_text(row.measured_bytes, longest), "\"></i>");
    words = size_text(row.measured_bytes);
  }
  if (row.forecast_bytes != kUnknownBytes) {
    track += concat("<u style=\"left:", percent_text(row.forecast_bytes, longest), "\"></u>");
    words += concat(words.empty() ? "" : " ", "<small>", words.empty() ? "forecast " : "of ",
                    size_text(row.forecast_bytes), "</small>");
  }
  return concat("<span class=\"", css_class, "\">", html_text(row.kind),
                "</span><span class=\"track\">", track, "</span><span class=\"", css_class, "\">",
                words, "</span>");
}

std::string z_text(double z) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%+.1f", z);
  return text.data();
}

}  // namespace

std::string peak_owner(const RunFacts& facts) {
  const bool is_on_gpu = std::any_of(
      facts.settings.begin(), facts.settings.end(),
      [](const SettingRow& row) { return row.name == "device" && row.value == "cuda"; });
  return is_on_gpu ? "of rank 0's GPU" : "of the process";
}

std::string memory_html(const RunFacts& facts) {
  const std::span<const MemoryRow> rows = facts.memory;
  if (rows.empty()) return "";
  int64_t longest = 1;
  std::vector<MemoryRow> totals;
  for (const bool is_on_host : {false, true}) {
    const bool is_used = std::any_of(rows.begin(), rows.end(), [&](const MemoryRow& row) {
      return row.is_on_host == is_on_host;
    });
    if (is_used) totals.push_back(total_of(rows, is_on_host));
  }
  for (const auto& each : {rows, std::span<const MemoryRow>(totals)})
    for (const MemoryRow& row : each)
      longest = std::max({longest, row.forecast_bytes, row.measured_bytes});
  std::string html =
      "<section class=\"card wide\" id=\"memory\"><header><h2>Memory</h2><span class=\"unit\">of "
      "the fullest "
      "rank</span><span class=\"legend\"><span class=\"key measured\">measured</span><span "
      "class=\"key "
      "forecast\">forecast</span></span></header><div class=\"bars\">";
  for (const MemoryRow& total : totals) {
    for (const MemoryRow& row : rows)
      if (row.is_on_host == total.is_on_host) html += memory_row_html(row, longest, "kind");
    html += memory_row_html(total, longest, "total");
  }
  return html +
         concat(
             "</div><p class=\"note\">This is the memory of the engine: weights, gradients, the "
             "optimizer's state and the buckets of one rank. Peak memory, above, is all memory ",
             peak_owner(facts),
             ": activations, libtorch and, in a process of several ranks, all of them "
             "come on top.</p></section>\n");
}

std::string checkpoints_html(const RunHistory& history) {
  if (history.checkpoints().empty()) return "";
  std::string html = concat(
      "<section class=\"card wide\" id=\"checkpoints\"><header><h2>Checkpoints</h2><span "
      "class=\"unit\">",
      history.num_checkpoints() > static_cast<int64_t>(history.checkpoints().size())
          ? concat("the newest of ", grouped_text(history.num_checkpoints()))
          : counted_text(history.num_checkpoints(), "checkpoint"),
      "</span></header><table class=\"wraps\"><thead><tr><th>step</th><th>directory</th><th "
      "class=\"number\">size</th>"
      "<th class=\"number extra\">written in</th><th class=\"number extra\">training "
      "waited</th></tr></thead><tbody>");
  for (const CheckpointRecord& record : history.checkpoints())
    html += concat("<tr><td>", grouped_text(record.step), "</td><td>", html_text(record.path),
                   "</td><td class=\"number\">", size_text(record.bytes),
                   "</td><td class=\"number extra\">", duration_text(record.milliseconds / 1000),
                   "</td><td class=\"number extra\">", figure_text(record.blocked_milliseconds),
                   " ms</td></tr>");
  return html + "</tbody></table></section>\n";
}

std::string outliers_html(const RunHistory& history) {
  if (history.outliers().empty()) return "";
  std::string html = concat(
      "<section class=\"card wide\" id=\"outliers\"><header><h2>Unusual losses</h2><span "
      "class=\"unit\">",
      counted_text(history.num_outliers(), "step"),
      ", by how many deviations the loss was off what the steps before let "
      "expect</span></header><p>");
  bool is_first = true;
  for (const StepRecord& record : history.outliers()) {
    html += concat(is_first ? "" : ", ", "step ", grouped_text(record.step), ": ",
                   figure_text(record.loss), " <small>(", z_text(record.loss_z), ")</small>");
    is_first = false;
  }
  return html + "</p></section>\n";
}

std::string settings_html(std::span<const SettingRow> rows) {
  if (rows.empty()) return "";
  std::vector<std::string> groups;
  for (const SettingRow& row : rows)
    if (std::find(groups.begin(), groups.end(), row.group) == groups.end())
      groups.push_back(row.group);
  std::string html =
      "<section class=\"card wide\" id=\"settings\"><header><h2>Settings</h2><span "
      "class=\"unit\">* changed "
      "from the default</span></header><div class=\"settings\">";
  for (const std::string& group : groups) {
    html += concat("<section><h3>", html_text(group), "</h3><table class=\"wraps\"><tbody>");
    for (const SettingRow& row : rows) {
      if (row.group != group) continue;
      html += concat("<tr", row.is_changed ? " class=\"changed\"" : "",
                     row.help.empty() ? "" : concat(" title=\"", html_text(row.help), "\""),
                     "><th scope=\"row\">", html_text(row.name), "</th><td>", html_text(row.value),
                     "</td></tr>");
    }
    html += "</tbody></table></section>";
  }
  return html + "</div></section>\n";
}

std::string environment_html(std::span<const EnvironmentRow> rows) {
  if (rows.empty()) return "";
  std::string html =
      "<section class=\"card wide\" id=\"environment\"><header><h2>Environment</h2></header><table "
      "class=\"wraps\"><tbody>";
  for (const EnvironmentRow& row : rows)
    html += concat("<tr><th scope=\"row\">", html_text(row.name), "</th><td>", html_text(row.value),
                   "</td></tr>");
  return html + "</tbody></table></section>\n";
}

std::string_view report_style() {
  return R"css(
:root{color-scheme:light dark;--page:#f7f7f5;--card:#fff;--ink:#1d2025;--soft:#61666e;--line:#e4e4e0;
--blue:#2563c9;--blue-soft:#8fb2e6;--orange:#c8641b;--green:#2b8a58;--violet:#7a55c0;--red:#c2382f;--shade:rgba(37,99,201,.13)}
@media (prefers-color-scheme:dark){:root{--page:#14161a;--card:#1c1f25;--ink:#e6e8eb;--soft:#9aa1ab;--line:#30353d;
--blue:#6ea6ff;--blue-soft:#3f5f93;--orange:#f0a05a;--green:#5cc48b;--violet:#b095ee;--red:#f0776c;--shade:rgba(110,166,255,.16)}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;font-variant-numeric:tabular-nums}
main{max-width:1160px;margin:0 auto;padding:2rem 1.25rem 3rem}
h1{font-size:1.6rem;line-height:1.25;font-weight:650;margin:0;overflow-wrap:anywhere}
h2{font-size:1rem;font-weight:650;margin:0}
h3{font-size:.8rem;font-weight:650;color:var(--soft);margin:1.1rem 0 .25rem}
.status{margin:.35rem 0 1.5rem;color:var(--soft);overflow-wrap:anywhere}
.status b{color:var(--ink);font-weight:600}
.status .dot{display:inline-block;width:.6em;height:.6em;border-radius:50%;margin-right:.5em;background:var(--green)}
.status .dot.running{background:var(--blue)}.status .dot.stopped{background:var(--orange)}
.grid{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:1rem}
.wide{grid-column:1/-1}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(118px,1fr));gap:.75rem;margin:0 0 1rem}
.card,.tile{background:var(--card);border:1px solid var(--line);border-radius:10px;min-width:0}
.card{padding:1rem 1.15rem 1.1rem}
.tile{padding:.7rem .9rem}
.tile dt{color:var(--soft);font-size:.8rem}
.tile dd{margin:0;font-size:1.3rem;font-weight:600;line-height:1.35;white-space:nowrap}
.tile dd small{display:block;white-space:normal;min-height:1.4em;font-size:.78rem;font-weight:400;color:var(--soft)}
.card>header{display:flex;flex-wrap:wrap;align-items:baseline;gap:.1rem .7rem;margin-bottom:.75rem}
.unit,.note,small{color:var(--soft)}
.unit,.legend{font-size:.82rem}
.note{font-size:.82rem;margin:.6rem 0 0}
.legend{margin-left:auto;display:flex;flex-wrap:wrap;gap:0 1rem}
.key::before{content:"";display:inline-block;width:1.1em;height:0;border-top:2.5px solid var(--blue);vertical-align:.28em;margin-right:.45em}
.key.faint::before{border-color:var(--blue-soft)}
.key.dots::before{width:.55em;height:.55em;border:0;border-radius:50%;background:var(--orange);vertical-align:.02em}
.plot{position:relative;display:grid;grid-template:13rem 1.5rem/2.9rem minmax(0,1fr)}
.wide .plot{grid-template-rows:19rem 1.5rem}
.area{grid-area:1/2;position:relative;border-bottom:1px solid var(--soft);touch-action:pan-y}
.area svg{position:absolute;inset:0;width:100%;height:100%;overflow:visible}.area.cut svg{overflow:hidden}
.ylabels{grid-area:1/1;position:relative}.xlabels{grid-area:2/2;position:relative}
.ylabels span,.xlabels span{position:absolute;font-size:.76rem;line-height:1;color:var(--soft);white-space:nowrap}
.ylabels span{right:.55rem;transform:translateY(50%)}
.xlabels span{top:.5rem;transform:translateX(-50%)}
.xlabels::before{content:"step";position:absolute;right:100%;top:.5rem;margin-right:.55rem;font-size:.76rem;line-height:1;color:var(--soft)}
path{fill:none;vector-effect:non-scaling-stroke;stroke-linejoin:round}
.grid path.grid,path.grid{stroke:var(--line);stroke-width:1}
path.mark{stroke:var(--soft);stroke-width:1;stroke-dasharray:3 4}
path.range{fill:var(--shade);stroke:none}
path.main{stroke:var(--blue);stroke-width:2}
path.faint{stroke:var(--blue-soft);stroke-width:1.25}
path.thread{stroke:var(--orange);stroke-width:1.25;opacity:.6}
path.dots{stroke:var(--orange);stroke-width:6;stroke-linecap:round}
.rule{position:absolute;top:0;bottom:0;width:1px;background:var(--soft);pointer-events:none}
.read{position:absolute;top:.35rem;padding:.3rem .55rem;background:var(--card);border:1px solid var(--line);border-radius:6px;
font-size:.78rem;line-height:1.45;white-space:nowrap;pointer-events:none;box-shadow:0 2px 8px rgba(0,0,0,.12)}
.read b{font-weight:600}
.bars{display:grid;grid-template-columns:max-content minmax(0,1fr) max-content;gap:.45rem .9rem;align-items:center;font-size:.9rem}
.track{position:relative;height:.95rem;background:var(--shade);border-radius:3px}
.track i{position:absolute;inset:0 auto 0 0;background:var(--blue);border-radius:3px}
.track u{position:absolute;top:-3px;bottom:-3px;width:2px;margin-left:-1px;background:var(--ink)}
.bars .total{font-weight:600}
.bars span:nth-child(3n){text-align:right}
.key.measured::before{height:.7em;border:0;background:var(--blue);border-radius:2px;vertical-align:-.05em}
.key.forecast::before{width:2px;height:.95em;border:0;background:var(--ink);vertical-align:-.15em}
.timeline{display:grid;gap:.3rem}
.timeline .row{display:grid;grid-template-columns:4.6rem minmax(0,1fr) 6.8rem;gap:.7rem;align-items:center;font-size:.88rem}
.timeline svg{width:100%;height:1.5rem;background:var(--shade);border-radius:3px;display:block}
.timeline .busy{text-align:right;white-space:nowrap}
.timeline .xlabels{grid-area:auto;height:1.5rem;margin:0 7.5rem 0 5.3rem}.timeline .xlabels::before{content:"ms"}
.row-0 rect{fill:var(--blue)}.row-1 rect{fill:var(--orange)}.row-2 rect{fill:var(--green)}.row-3 rect{fill:var(--violet)}.row-4 rect{fill:var(--soft)}
.timeline rect:hover{fill:var(--ink)}
pre{margin:0;padding:.85rem 1rem;background:var(--page);border-radius:6px;font:13.5px/1.55 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;white-space:pre-wrap;overflow-wrap:anywhere}
pre b{color:var(--blue);font-weight:600}
table{width:100%;border-collapse:collapse;font-size:.88rem;table-layout:auto}
th,td{text-align:left;vertical-align:top;padding:.3rem .75rem .3rem 0;border-top:1px solid var(--line);font-weight:400}
thead th{color:var(--soft);font-size:.8rem;border-top:0}
td:last-child,th:last-child{padding-right:0}
td{overflow-wrap:anywhere}
th[scope=row]{white-space:nowrap}
.number{text-align:right;white-space:nowrap}
.settings{columns:2;column-gap:2.5rem}
.settings section{break-inside:avoid}
.settings section:first-child h3{margin-top:0}
.settings td{text-align:right}
.changed th,.changed td{font-weight:650}
.changed th::after{content:" *";color:var(--orange)}
footer{margin-top:1.5rem;color:var(--soft);font-size:.82rem}
@media (max-width:760px){.grid,.settings{grid-template-columns:minmax(0,1fr);columns:1}main{padding:1.25rem .75rem 2rem}
.card{padding:.85rem .8rem}.wide .plot{grid-template-rows:14rem 1.5rem}.plot{grid-template-columns:2.5rem minmax(0,1fr)}
.legend{margin-left:0}.tiles{grid-template-columns:repeat(2,minmax(0,1fr));gap:.6rem}.tile dd{font-size:1.15rem}
.xlabels span:nth-child(even){display:none}.bars{grid-template-columns:minmax(0,1fr) max-content;gap:.15rem .6rem}
.bars .track{grid-column:1/-1;order:0;margin-bottom:.45rem}.bars span:nth-child(3n+1){order:0}.bars{grid-auto-flow:dense}
.timeline .row{grid-template-columns:3.9rem minmax(0,1fr) 4.2rem;gap:.4rem}.timeline small{display:none}.timeline .xlabels{margin:0 4.6rem 0 4.3rem}
.wraps th[scope=row]{white-space:normal}.extra{display:none}}
@media print{body{background:#fff}.card,.tile{break-inside:avoid}}
)css";
}

std::string_view report_script() {
  return R"js(
(function(){
'use strict';
function text(v){var a=Math.abs(v);return a===0?'0':a>=1e4?Math.round(v).toLocaleString('en'):a>=1e-3?String(+v.toPrecision(4)):v.toExponential(2);}
function nearest(x,at){var lo=0,hi=x.length-1;while(hi-lo>1){var m=(lo+hi)>>1;if(x[m]<at)lo=m;else hi=m;}return at-x[lo]<x[hi]-at?lo:hi;}
document.querySelectorAll('.chart').forEach(function(card){
  var data=JSON.parse(card.querySelector('script').textContent),area=card.querySelector('.area'),svg=area.querySelector('svg');
  var title=svg.querySelector('title');svg.setAttribute('aria-label',title.textContent);svg.removeAttribute('aria-labelledby');title.remove();
  var rule=document.createElement('div'),read=document.createElement('div');rule.className='rule';read.className='read';
  rule.hidden=read.hidden=true;area.append(rule,read);
  area.addEventListener('pointermove',function(event){
    var box=area.getBoundingClientRect(),part=Math.min(1,Math.max(0,(event.clientX-box.left)/box.width));
    var at=data.from+part*(data.to-data.from),main=data.lines[0],step=main.x[nearest(main.x,at)];
    var rows=['step <b>'+text(Math.round(step))+'</b>'];
    data.lines.forEach(function(line){
      if(!line.x.length)return;
      var i=nearest(line.x,step);
      var name=line.look==='dots'?line.name+' (step '+text(line.x[i])+')':line.name;
      rows.push(name+' <b>'+(line.y[i]===null?'not finite':text(line.y[i]))+'</b>');});
    var left=(step-data.from)/((data.to-data.from)||1)*100;
    read.innerHTML=rows.join('<br>');rule.hidden=read.hidden=false;rule.style.left=left+'%';
    read.style.left=left<50?'calc('+left+'% + 10px)':'auto';read.style.right=left<50?'auto':'calc('+(100-left)+'% + 10px)';
  });
  area.addEventListener('pointerleave',function(){rule.hidden=read.hidden=true;});
});
})();
)js";
}

}  // namespace fsdp::train
