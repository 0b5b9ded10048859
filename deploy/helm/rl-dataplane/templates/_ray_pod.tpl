{{- /* The pod of a node of Ray. */}}
{{- define "rl-dataplane.ray-pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false
terminationGracePeriodSeconds: 60
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
containers:
  - name: ray-{{ .name }}
    image: {{ .image | quote }}
    securityContext:
      allowPrivilegeEscalation: false
      readOnlyRootFilesystem: true
      capabilities:
        drop: [ALL]
    env:
      - name: RAY_AUTH_MODE
        value: token
      - name: RAY_AUTH_TOKEN_PATH
        value: /run/secrets/ray/token
      {{- if .isHead }}
      # Declare a silent machine dead after about 12 s, not Ray's default minute; its run then
      # fails. Only the head sends health checks to the nodes.
      - name: RAY_health_check_period_ms
        value: "1000"
      - name: RAY_health_check_timeout_ms
        value: "3000"
      - name: RAY_health_check_failure_threshold
        value: "3"
      {{- end }}
      # Actors export to the admin service, which requires its token.
      - name: ADMIN_TOKEN
        valueFrom:
          secretKeyRef:
            name: {{ .tokenSecret | quote }}
            key: token
      - name: OTEL_EXPORTER_OTLP_HEADERS
        value: Authorization=Bearer%20$(ADMIN_TOKEN)
      - name: OTEL_METRIC_EXPORT_INTERVAL
        value: "10000" # ms; the default of 60 s is longer than a run of a few steps
    resources:
      {{- toYaml .resources | nindent 6 }}
    # Check the cluster's control store, with the token. The node needs no check: `ray start --block`
    # and its container end with it.
    startupProbe:
      exec:
        command: [ray, health-check]
      periodSeconds: 10
      timeoutSeconds: 10
      failureThreshold: 30
    readinessProbe:
      exec:
        command: [ray, health-check]
      timeoutSeconds: 10
      periodSeconds: 15
      failureThreshold: 3
    livenessProbe:
      exec:
        command: [ray, health-check]
      timeoutSeconds: 10
      periodSeconds: 30
      failureThreshold: 6
    volumeMounts:
      - {name: tmp, mountPath: /tmp}
      - {name: shm, mountPath: /dev/shm}
      - {name: runs, mountPath: /data}
      - {name: ray, mountPath: /run/secrets/ray, readOnly: true}
      - {name: refit, mountPath: /run/secrets/refit, readOnly: true}
volumes:
  - name: tmp # sockets and logs
    emptyDir:
      sizeLimit: 4Gi
  - name: shm # the object store; counts as memory
    emptyDir:
      medium: Memory
      sizeLimit: 512Mi
  - name: runs
    persistentVolumeClaim:
      claimName: runs
  - name: ray
    secret:
      secretName: ray
      defaultMode: 0440
  - name: refit
    secret:
      secretName: refit-access
      defaultMode: 0440
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
