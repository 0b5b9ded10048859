// Shows the API's document in Swagger UI, which swagger-ui-bundle.js defines.
const root = document.documentElement;
const node = document.getElementById("api");
const systemTheme = matchMedia("(prefers-color-scheme: dark)");

function paint() {
  root.classList.toggle("dark-mode", root.dataset.theme ? root.dataset.theme === "dark" : systemTheme.matches);
}

paint();
systemTheme.addEventListener("change", paint);
new MutationObserver(paint).observe(root, { attributeFilter: ["data-theme"] });

// A layout that omits three parts: a second main landmark, the document's heading and the choice of a server.
const pageLayout = ({ React: { createElement } }) => ({
  components: {
    PageLayout: ({ getComponent, specSelectors }) => {
      const parts = ["errors"];
      if (specSelectors.loadingStatus() === "success") parts.push("AuthorizeBtnContainer", "operations", "Models");
      const shown = parts.map((name) => createElement(getComponent(name, true), { key: name }));
      return createElement("div", { className: "swagger-ui" }, createElement(getComponent("SvgAssets")), shown);
    },
    // No link, since it would be inside the button that expands an operation.
    DeepLink: ({ text }) => createElement("span", null, text),
    TextArea: (given) => createElement("textarea", { ...given, "aria-label": "Request body" }),
  },
});

SwaggerUIBundle({
  domNode: node,
  url: node.dataset.document,
  plugins: [pageLayout],
  layout: "PageLayout",
  deepLinking: true,
  displayOperationId: true,
  // No request to a validator on the internet.
  validatorUrl: null,
  // The curl command shows what the user entered, without the session's CSRF value.
  showMutatedRequest: false,
  requestInterceptor: (request) => {
    if (!request.headers.Authorization) request.headers["X-CSRF-Token"] = node.dataset.csrf;
    return request;
  },
});
