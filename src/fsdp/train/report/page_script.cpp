// What a report's page can do in a browser. Charts are drawn without it; it draws them again for a
// part of the run, or over tokens instead of steps, from the figures that stand beside each.
#include "fsdp/train/report/page_frame.h"

namespace fsdp::train {

namespace {

constexpr std::string_view kPageScript = R"js(
(function(){
'use strict';
var W=1000,H=300,charts=[],key='fsdp report '+location.pathname,view={axis:'step',zoom:{}};
// A page of a run that goes on is loaded again and again; what a reader chose stays.
try{view=Object.assign(view,JSON.parse(sessionStorage.getItem(key)));}catch(error){}
function keep(){try{sessionStorage.setItem(key,JSON.stringify(view));}catch(error){}}
function make(name,className){var each=document.createElement(name);each.className=className;return each;}
function text(v){var a=Math.abs(v);return a===0?'0':a>=1e4?Math.round(v).toLocaleString('en'):a>=1e-3?String(+v.toPrecision(4)):v.toExponential(2);}
function nearest(x,at){var lo=0,hi=x.length-1;while(hi-lo>1){var m=(lo+hi)>>1;if(x[m]<at)lo=m;else hi=m;}return at-x[lo]<x[hi]-at?lo:hi;}

// --- axes, as chart_axis.cpp has them ---
function label(v,step,top){
  var unit=top>=1e9?1e9:top>=1e6?1e6:top>=1e4?1e3:1,digits=Math.min(6,Math.max(0,-Math.floor(Math.log10(step/unit)+1e-9)));
  if(v===0)return '0';
  if(top<1e-3)return (+v.toPrecision(2)).toExponential();
  return (digits?(v/unit).toFixed(digits):Math.round(v/unit).toLocaleString('en'))+({1e9:'G',1e6:'M',1e3:'k'}[unit]||'');}
function ticks(low,high,log){
  var found=[],top=Math.max(Math.abs(low),Math.abs(high)),i;
  if(log&&high>3*low){
    for(i=Math.floor(Math.log10(low));i<=Math.log10(high);i++)[1,2,5].forEach(function(digit){
      var v=digit*Math.pow(10,i);if(v>=low&&v<=high&&(digit===1||high<300*low))found.push([v,label(v,v,v)]);});
    return found;}
  var rough=(high-low)/5,power=Math.pow(10,Math.floor(Math.log10(rough))),digit=rough/power;
  var step=power*(digit<1.5?1:digit<3?2:digit<7.5?5:10);
  for(i=Math.ceil(low/step-1e-6);i*step<=high+step*1e-6;i++)found.push([i*step,label(i*step,step,top)]);
  return found;}
// The place of a step on the axis: itself, or the tokens trained on by then.
function place(line,step){
  var marks=line.tokens,i=1;
  if(view.axis==='step'||marks.length<2)return step;
  while(i<marks.length-1&&marks[i][0]<step)i++;
  var a=marks[i-1],b=marks[i];
  return a[1]+(step-a[0])*(b[1]-a[1])/(b[0]-a[0]);}

// --- drawing ---
function extent(values){
  var low=Infinity,high=-Infinity;
  values.forEach(function(v){if(v!==null&&v<low)low=v;if(v!==null&&v>high)high=v;});
  return high>low?[low,high]:[low-Math.abs(low)/10-1e-9,high+Math.abs(high)/10+1e-9];}
function draw(chart){
  var data=chart.data,zoom=view.zoom[chart.id],log=data.log;
  chart.x=data.lines.map(function(line){return line.x.map(function(step){return place(line,step);});});
  var whole=extent([].concat.apply([],chart.x)),from=zoom?zoom[0]:whole[0],to=zoom?zoom[1]:whole[1],low=data.low,high=data.high;
  var ranges=data.ranges.map(function(r){return [place(data.lines[0],r[0]),r[1],r[2]];});
  if(zoom){
    var seen=[];
    data.lines.forEach(function(line,k){line.y.forEach(function(y,i){if(chart.x[k][i]>=from&&chart.x[k][i]<=to&&y!==null)seen.push(y);});});
    if(seen.length){var ends=extent(seen),margin=(ends[1]-ends[0])/20;low=log?ends[0]:ends[0]-margin;high=log?ends[1]:ends[1]+margin;}}
  chart.from=from;chart.to=to;
  function px(x){return ((x-from)/(to-from)*W).toFixed(1);}
  function py(y){var part=log?Math.log(y/low)/Math.log(high/low):(y-low)/(high-low);return (H*(1-Math.min(2,Math.max(-1,part)))).toFixed(1);}
  data.lines.forEach(function(line,k){
    var x=chart.x[k],first=0,last=x.length-1;
    // Far places are drawn badly; one beyond each end is enough.
    while(first<last&&x[first+1]<from)first++;
    while(last>first&&x[last-1]>to)last--;
    chart.area.querySelectorAll('[data-line="'+k+'"]').forEach(function(path){
      var dots=path.classList.contains('dots'),down=false,d='';
      for(var i=first;i<=last;i++){
        if(line.y[i]===null){down=false;continue;}
        d+=(down?'L':'M')+px(x[i])+','+py(line.y[i])+(dots?'h0':'');down=!dots;}
      path.setAttribute('d',d);});});
  var shown=ranges.filter(function(r,i){return (!ranges[i+1]||ranges[i+1][0]>=from)&&(!ranges[i-1]||ranges[i-1][0]<=to);});
  set('.range',shown.map(function(r,i){return (i?'L':'M')+px(r[0])+','+py(r[2]);}).join('')+
    shown.reverse().map(function(r){return 'L'+px(r[0])+','+py(r[1]);}).join('')+(shown.length?'Z':''));
  var level=ticks(low,high,log),across=ticks(from,to,false).filter(function(t){return t[0]===Math.floor(t[0]);});
  set('.grid',level.map(function(t){return 'M0,'+py(t[0])+'H'+W;}).join(''));
  set('.mark',data.marks.map(function(step){return 'M'+px(place(data.lines[0],step))+',0V'+H;}).join(''));
  function set(selector,d){var path=chart.area.querySelector('path'+selector);if(path)path.setAttribute('d',d);}
  chart.card.querySelector('.ylabels').innerHTML=level.map(function(t){return '<span style="bottom:'+(100-py(t[0])/H*100)+'%">'+t[1]+'</span>';}).join('');
  chart.card.querySelector('.xlabels').innerHTML=across.map(function(t){return '<span style="left:'+(px(t[0])/W*100)+'%">'+t[1]+'</span>';}).join('');
  chart.area.classList.toggle('cut',!!zoom||chart.cuts);chart.reset.hidden=!zoom;}
function zoom_to(chart,range){if(range)view.zoom[chart.id]=range;else delete view.zoom[chart.id];keep();draw(chart);}

// --- what a reader does ---
function listen(chart){
  var area=chart.area,rule=make('div','rule'),read=make('div','read'),chosen=make('div','chosen'),pressed=null;
  rule.hidden=read.hidden=chosen.hidden=true;area.append(rule,read,chosen);
  function part(event){var box=area.getBoundingClientRect();return Math.min(1,Math.max(0,(event.clientX-box.left)/box.width));}
  function value(p){return chart.from+p*(chart.to-chart.from);}
  area.addEventListener('pointermove',function(event){
    var at=value(part(event)),lines=chart.data.lines,main=chart.x[0],x=lines[0].look==='main'&&lines.length>1&&lines[1].look==='main'?at:main[nearest(main,at)];
    var rows=[view.axis+' <b>'+text(Math.round(x))+'</b>'];
    lines.forEach(function(line,k){
      var places=chart.x[k];
      if(!places.length||x>places[places.length-1]+(chart.to-chart.from)/50)return;
      var i=nearest(places,x),name=line.look==='dots'?line.name+' (step '+text(line.x[i])+')':line.name;
      rows.push(name+' <b>'+(line.y[i]===null?'not finite':text(line.y[i]))+'</b>');});
    var left=(x-chart.from)/((chart.to-chart.from)||1)*100;
    read.innerHTML=rows.join('<br>');rule.hidden=read.hidden=false;rule.style.left=left+'%';
    read.style.left=left<50?'calc('+left+'% + 10px)':'auto';read.style.right=left<50?'auto':'calc('+(100-left)+'% + 10px)';
    if(pressed===null)return;
    var other=part(event);chosen.hidden=false;
    chosen.style.left=100*Math.min(pressed,other)+'%';chosen.style.width=100*Math.abs(pressed-other)+'%';});
  area.addEventListener('pointerleave',function(){rule.hidden=read.hidden=true;});
  // A finger scrolls the page.
  area.addEventListener('pointerdown',function(event){if(event.button===0&&event.pointerType!=='touch')pressed=part(event);});
  addEventListener('pointerup',function(event){
    if(pressed===null)return;
    var ends=[pressed,part(event)].sort(function(a,b){return a-b;});
    pressed=null;chosen.hidden=true;
    if(ends[1]-ends[0]>0.01)zoom_to(chart,ends.map(value));});
  area.addEventListener('dblclick',function(){zoom_to(chart,null);});
  chart.reset.addEventListener('click',function(){zoom_to(chart,null);});}
function choose_axis(axis){
  if(view.axis!==axis)view.zoom={};
  view.axis=axis;keep();document.body.classList.toggle('tokens',axis==='tokens');
  document.querySelectorAll('.axis button').forEach(function(each){each.setAttribute('aria-pressed',String(each.textContent===axis+(axis==='step'?'s':'')));});
  charts.forEach(draw);}

document.querySelectorAll('.chart').forEach(function(card){
  var data=JSON.parse(card.querySelector('script').textContent),area=card.querySelector('.area'),svg=area.querySelector('svg');
  var title=svg.querySelector('title');svg.setAttribute('aria-label',title.textContent);svg.removeAttribute('aria-labelledby');title.remove();
  var reset=make('button','reset');reset.textContent='all';reset.title='Show the whole run';reset.hidden=true;card.querySelector('header').append(reset);
  var chart={id:card.id,card:card,area:area,data:data,reset:reset,cuts:area.classList.contains('cut'),from:data.from,to:data.to,
    x:data.lines.map(function(line){return line.x;})};
  charts.push(chart);listen(chart);});
if(charts.length){
  var bar=make('div','axis');
  if(charts[0].data.lines.some(function(line){return line.tokens.length>1;}))['step','tokens'].forEach(function(axis){
    var button=make('button','');button.textContent=axis==='step'?'steps':axis;button.addEventListener('click',function(){choose_axis(axis);});bar.append(button);});
  else view.axis='step';
  bar.append('Drag over a chart to zoom in; a double click shows all again.');
  document.querySelector('.grid').before(bar);
  if(view.axis==='tokens'||Object.keys(view.zoom).length)choose_axis(view.axis);
  else document.querySelectorAll('.axis button').forEach(function(each,i){each.setAttribute('aria-pressed',String(i===0));});
}
})();
)js";

}  // namespace

std::string_view page_script() { return kPageScript; }

}  // namespace fsdp::train
