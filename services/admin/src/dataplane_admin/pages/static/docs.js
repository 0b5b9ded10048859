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

SwaggerUIBundle({
  domNode: node,
  url: node.dataset.document,
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
