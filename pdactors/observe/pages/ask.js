"use strict";
const byId = (id) => document.getElementById(id);
const make = (tag, text = "", kind = "") => {
  const element = document.createElement(tag);
  element.textContent = text;
  if (kind) element.className = kind;
  return element;
};
// Ask this server; if it wants a token, have the person give one, which stays in this tab.
const ask = async (path, options = {}) => {
  const token = sessionStorage.getItem("token") || "";
  const headers = { ...(options.headers || {}), ...(token ? { authorization: `Bearer ${token}` } : {}) };
  const response = await fetch(path, { ...options, headers });
  byId("token").style.display = response.status === 401 ? "flex" : "none";
  if (!response.ok) {
    const body = await response.json().catch(() => ({}));
    throw Object.assign(new Error(body.error ? body.error.message : `status ${response.status}`), { status: response.status });
  }
  return response;
};
const withToken = (then) => byId("token").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("token", byId("token-text").value);
  then();
});
const ms = (value) => value >= 10000 ? `${(value / 1000).toFixed(2)} s` : value >= 100 ? `${value.toFixed(0)} ms`
  : value >= 1 ? `${value.toFixed(1)} ms` : `${(1000 * value).toFixed(0)} µs`;
