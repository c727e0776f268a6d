/* A stand-in for libdcgm.so.4 with a host engine inside, made from the documented ABI (dcgm_agent.h, dcgm_structs.h).
 *
 * It follows the file named by FAKE_DCGM, which it reads at every call. Each line is a statement:
 *   gpus ID...                     switches ID...    links ID...    cpus ID...
 *   value GROUP ENTITY FIELD TYPE VALUE       TYPE i, d or s as in DCGM; `blank` is DCGM's blank of that type, and
 *                                             `unsupported` and `forbidden` the next ones
 *   status GROUP ENTITY FIELD CODE            instead of a value; -1 for ENTITY or FIELD is any
 *   at SECONDS                                time stamp of the values
 *   return CALL CODE                          the call fails; `dcgmWatchFields:1004` only with that field
 *   hang CALL                                 the call never returns
 *   group MAJOR MINOR ID...                   a group of profiling fields, the same for every GPU
 *   paused                                    fields 1001-1016 are blank
 * A field that is not watched through this connection has status -16. Calls are written to the file FAKE_DCGM.calls.
 */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct {
    unsigned int version, persistAfterDisconnect, timeoutMs, addressIsUnixSocket;
} dcgmConnectV2Params_v2;

typedef struct {
    unsigned int entityGroupId, entityId;
} dcgmGroupEntityPair_t;

typedef struct {
    unsigned int version, entityGroupId, entityId;
    unsigned short fieldId, fieldType;
    int status;
    unsigned int unused;
    int64_t ts;
    union {
        int64_t i64;
        double dbl;
        char str[256];
        char blob[4096];
    } value;
} dcgmFieldValue_v2;

typedef struct {
    unsigned int version;
    unsigned short fieldId, fieldType;
    int status;
    int64_t ts;
    union {
        int64_t i64;
        double dbl;
        char str[256];
        char blob[4096];
    } value;
} dcgmFieldValue_v1;

typedef struct {
    unsigned short majorId, minorId;
    unsigned int numFieldIds;
    unsigned short fieldIds[64];
} dcgmProfMetricGroupInfo_v2;

typedef struct {
    unsigned int version, unused, gpuId, numMetricGroups;
    dcgmProfMetricGroupInfo_v2 metricGroups[10];
} dcgmProfGetMetricGroups_v3;

#define VERSION(type, release) ((unsigned int)(sizeof(type) | (unsigned int)(release) << 24))

_Static_assert(VERSION(dcgmConnectV2Params_v2, 2) == 0x02000010, "dcgmConnectV2Params_version2");
_Static_assert(offsetof(dcgmConnectV2Params_v2, addressIsUnixSocket) == 12, "dcgmConnectV2Params_v2");
_Static_assert(VERSION(dcgmFieldValue_v1, 1) == 0x01001018, "dcgmFieldValue_version1");
_Static_assert(sizeof(dcgmFieldValue_v1) == 4120, "dcgmFieldValue_v1");
_Static_assert(offsetof(dcgmFieldValue_v1, value) == 24, "dcgmFieldValue_v1");
_Static_assert(VERSION(dcgmFieldValue_v2, 2) == 0x02001020, "dcgmFieldValue_version2");
_Static_assert(sizeof(dcgmFieldValue_v2) == 4128, "dcgmFieldValue_v2");
_Static_assert(offsetof(dcgmFieldValue_v2, entityGroupId) == 4, "dcgmFieldValue_v2");
_Static_assert(offsetof(dcgmFieldValue_v2, entityId) == 8, "dcgmFieldValue_v2");
_Static_assert(offsetof(dcgmFieldValue_v2, fieldId) == 12, "dcgmFieldValue_v2");
_Static_assert(offsetof(dcgmFieldValue_v2, fieldType) == 14, "dcgmFieldValue_v2");
_Static_assert(offsetof(dcgmFieldValue_v2, status) == 16, "dcgmFieldValue_v2");
_Static_assert(offsetof(dcgmFieldValue_v2, ts) == 24, "dcgmFieldValue_v2");
_Static_assert(offsetof(dcgmFieldValue_v2, value) == 32, "dcgmFieldValue_v2");
_Static_assert(sizeof(dcgmGroupEntityPair_t) == 8, "dcgmGroupEntityPair_t");
_Static_assert(VERSION(dcgmProfGetMetricGroups_v3, 3) == 0x03000560, "dcgmProfGetMetricGroups_version3");
_Static_assert(offsetof(dcgmProfGetMetricGroups_v3, metricGroups) == 16, "dcgmProfGetMetricGroups_v3");
_Static_assert(sizeof(uintptr_t) == 8, "dcgmHandle_t, dcgmGpuGrp_t, dcgmFieldGrp_t");

enum { HANDLE = 0x7f0000001234, FIRST_GROUP = 0x100000002, FIRST_FIELDS = 0x200000002, MOST = 64 };

static int connected;
static struct {
    unsigned int count;
    dcgmGroupEntityPair_t pairs[1024];
} groups[MOST];
static struct {
    int count;
    unsigned short ids[128];
} fields[MOST];
static int group_count, fields_count;
static struct {
    int group, fields;
} watches[MOST];
static int watch_count;

static FILE *script(void) {
    const char *path = getenv("FAKE_DCGM");
    return path ? fopen(path, "r") : NULL;
}

static void note(const char *call, const char *detail) {
    char path[4096];
    const char *script_path = getenv("FAKE_DCGM");
    if (!script_path)
        return;
    snprintf(path, sizeof path, "%s.calls", script_path);
    FILE *file = fopen(path, "a");
    if (file) {
        fprintf(file, "%s%s%s\n", call, *detail ? " " : "", detail);
        fclose(file);
    }
}

/* Return what the script has for a call, 0 if nothing; do not return if it is to hang. */
static int outcome(const char *call) {
    char line[512], name[256];
    int code = 0, one;
    FILE *file = script();
    while (file && fgets(line, sizeof line, file)) {
        if (sscanf(line, "return %255s %d", name, &one) == 2 && !strcmp(name, call))
            code = one;
        if (sscanf(line, "hang %255s", name) == 1 && !strcmp(name, call)) {
            fclose(file);
            for (;;)
                pause();
        }
    }
    if (file)
        fclose(file);
    return code;
}

#define BEGIN(call, detail)          \
    note(#call, detail);             \
    {                                \
        int code = outcome(#call);   \
        if (code)                    \
            return code;             \
    }
#define BEGIN_CONNECTED(call, detail)         \
    BEGIN(call, detail)                       \
    if (!connected || handle != (uintptr_t)HANDLE) \
        return -21;

static int entities_of(const char *statement, unsigned int *ids, int capacity) {
    char line[65536];
    int count = 0;
    FILE *file = script();
    while (file && fgets(line, sizeof line, file)) {
        char *word = strtok(line, " \n");
        if (!word || strcmp(word, statement))
            continue;
        while ((word = strtok(NULL, " \n")) && count < capacity)
            ids[count++] = (unsigned int)strtoul(word, NULL, 0);
    }
    if (file)
        fclose(file);
    return count;
}

int dcgmInit(void) {
    BEGIN(dcgmInit, "");
    return 0;
}

int dcgmConnect_v2(const char *address, dcgmConnectV2Params_v2 *parameters, uintptr_t *handle) {
    char detail[256];
    if (parameters->version != 0x02000010)
        return -12;
    snprintf(detail, sizeof detail, "%s%s %u ms", parameters->addressIsUnixSocket ? "unix " : "", address,
             parameters->timeoutMs);
    BEGIN(dcgmConnect_v2, detail);
    connected = 1;
    group_count = fields_count = watch_count = 0;
    *handle = (uintptr_t)HANDLE;
    return 0;
}

int dcgmDisconnect(uintptr_t handle) {
    BEGIN_CONNECTED(dcgmDisconnect, "");
    connected = 0;
    return 0;
}

int dcgmGetAllDevices(uintptr_t handle, unsigned int ids[32], int *count) {
    BEGIN_CONNECTED(dcgmGetAllDevices, "");
    *count = entities_of("gpus", ids, 32);
    return 0;
}

int dcgmGetEntityGroupEntities(uintptr_t handle, int kind, unsigned int *ids, int *count, unsigned int flags) {
    (void)flags;
    BEGIN_CONNECTED(dcgmGetEntityGroupEntities, "");
    *count = entities_of(kind == 1 ? "gpus" : kind == 3 ? "switches" : kind == 6 ? "links" : kind == 7 ? "cpus" : "",
                         ids, *count);
    return *count ? 0 : -33;
}

int dcgmGroupCreate(uintptr_t handle, int type, const char *name, uintptr_t *group) {
    (void)name;
    BEGIN_CONNECTED(dcgmGroupCreate, "");
    if (type != 1)
        return -1;
    if (group_count == MOST)
        return -24;
    groups[group_count].count = 0;
    *group = (uintptr_t)FIRST_GROUP + (uintptr_t)group_count++;
    return 0;
}

int dcgmGroupAddEntity(uintptr_t handle, uintptr_t group, int kind, unsigned int entity) {
    BEGIN_CONNECTED(dcgmGroupAddEntity, "");
    int place = (int)(group - (uintptr_t)FIRST_GROUP);
    if (place < 0 || place >= group_count)
        return -1;
    groups[place].pairs[groups[place].count++] = (dcgmGroupEntityPair_t){(unsigned int)kind, entity};
    return 0;
}

int dcgmGroupDestroy(uintptr_t handle, uintptr_t group) {
    (void)group;
    BEGIN_CONNECTED(dcgmGroupDestroy, "");
    return 0;
}

int dcgmFieldGroupCreate(uintptr_t handle, int count, unsigned short *ids, const char *name, uintptr_t *group) {
    (void)name;
    BEGIN_CONNECTED(dcgmFieldGroupCreate, "");
    if (fields_count == MOST)
        return -24;
    if (count < 1 || count > 128)
        return -1;
    fields[fields_count].count = count;
    memcpy(fields[fields_count].ids, ids, sizeof *ids * (size_t)count);
    *group = (uintptr_t)FIRST_FIELDS + (uintptr_t)fields_count++;
    return 0;
}

int dcgmFieldGroupDestroy(uintptr_t handle, uintptr_t group) {
    (void)group;
    BEGIN_CONNECTED(dcgmFieldGroupDestroy, "");
    return 0;
}

int dcgmWatchFields(uintptr_t handle, uintptr_t group, uintptr_t field_group, int64_t every, double keep, int most) {
    char detail[1024] = "", name[64];
    int place = (int)(field_group - (uintptr_t)FIRST_FIELDS), length;
    (void)most;
    if (place < 0 || place >= fields_count)
        return -1;
    length = snprintf(detail, sizeof detail, "every %lld us for %g s:", (long long)every, keep);
    for (int i = 0; i < fields[place].count; i++)
        length += snprintf(detail + length, sizeof detail - (size_t)length, " %u", fields[place].ids[i]);
    BEGIN_CONNECTED(dcgmWatchFields, detail);
    for (int i = 0; i < fields[place].count; i++) {
        snprintf(name, sizeof name, "dcgmWatchFields:%u", fields[place].ids[i]);
        int code = outcome(name);
        if (code)
            return code;
    }
    watches[watch_count].group = (int)(group - (uintptr_t)FIRST_GROUP);
    watches[watch_count++].fields = place;
    return 0;
}

int dcgmProfGetSupportedMetricGroups(uintptr_t handle, dcgmProfGetMetricGroups_v3 *found) {
    char line[512];
    unsigned int number = 0;
    BEGIN_CONNECTED(dcgmProfGetSupportedMetricGroups, "");
    if (found->version != 0x03000560)
        return -12;
    FILE *file = script();
    while (file && fgets(line, sizeof line, file)) {
        char *word = strtok(line, " \n");
        if (!word || strcmp(word, "group"))
            continue;
        dcgmProfMetricGroupInfo_v2 *group = &found->metricGroups[number++];
        group->majorId = (unsigned short)strtoul(strtok(NULL, " \n"), NULL, 0);
        group->minorId = (unsigned short)strtoul(strtok(NULL, " \n"), NULL, 0);
        group->numFieldIds = 0;
        while ((word = strtok(NULL, " \n")))
            group->fieldIds[group->numFieldIds++] = (unsigned short)strtoul(word, NULL, 0);
    }
    if (file)
        fclose(file);
    found->numMetricGroups = number;
    return number ? 0 : -36;
}

int dcgmUnwatchFields(uintptr_t handle, uintptr_t group, uintptr_t field_group) {
    (void)group;
    (void)field_group;
    BEGIN_CONNECTED(dcgmUnwatchFields, "");
    return 0;
}

int dcgmUpdateAllFields(uintptr_t handle, int wait) {
    (void)wait;
    BEGIN_CONNECTED(dcgmUpdateAllFields, "");
    return 0;
}

static int watched(dcgmGroupEntityPair_t pair, unsigned short field) {
    for (int i = 0; i < watch_count; i++) {
        int in_group = 0, in_fields = 0;
        for (unsigned int j = 0; j < groups[watches[i].group].count; j++)
            in_group |= !memcmp(&groups[watches[i].group].pairs[j], &pair, sizeof pair);
        for (int j = 0; j < fields[watches[i].fields].count; j++)
            in_fields |= fields[watches[i].fields].ids[j] == field;
        if (in_group && in_fields)
            return 1;
    }
    return 0;
}

static void set(dcgmFieldValue_v2 *value, char type, const char *text) {
    int special = !strcmp(text, "blank") ? 0 : !strcmp(text, "unsupported") ? 2 : !strcmp(text, "forbidden") ? 3 : -1;
    value->status = 0;
    value->fieldType = (unsigned short)type;
    if (type == 'i')
        value->value.i64 = special < 0 ? strtoll(text, NULL, 0) : INT64_C(0x7ffffffffffffff0) + special;
    else if (type == 'd')
        value->value.dbl = special < 0 ? strtod(text, NULL) : 140737488355328.0 + special;
    else
        snprintf(value->value.str, sizeof value->value.str, "%s", special < 0 ? text : special ? "<<<NOT_SUPPORTED>>>" : "<<<NULL>>>");
}

/* One pass over the script for all values: a real host engine does not open a file for each either. */
static void fill(dcgmFieldValue_v2 *values, unsigned int count, FILE *file) {
    char line[512], text[256], type;
    int kind, entity, field, code, paused = 0;
    double at = 0;
    while (file && fgets(line, sizeof line, file)) {
        int is_status = sscanf(line, "status %d %i %d %d", &kind, &entity, &field, &code) == 4;
        int is_value = !is_status && sscanf(line, "value %d %i %d %c %255[^\n]", &kind, &entity, &field, &type, text) == 5;
        paused |= !strncmp(line, "paused", 6);
        sscanf(line, "at %lf", &at);
        for (unsigned int i = 0; (is_status || is_value) && i < count; i++) {
            dcgmFieldValue_v2 *value = &values[i];
            if ((int)value->entityGroupId != kind || (entity >= 0 && (int)value->entityId != entity)
                || (field >= 0 && value->fieldId != field) || value->status == -16)
                continue;
            if (is_status)
                value->status = code;
            else
                set(value, type, text);
        }
    }
    for (unsigned int i = 0; i < count; i++) {
        values[i].ts = (int64_t)(at * 1e6);
        if (paused && values[i].status == 0 && values[i].fieldId >= 1001 && values[i].fieldId <= 1016)
            set(&values[i], (char)values[i].fieldType, "blank");
    }
}

int dcgmEntitiesGetLatestValues(uintptr_t handle, dcgmGroupEntityPair_t *pairs, unsigned int pair_count,
                                unsigned short *ids, unsigned int count, unsigned int flags,
                                dcgmFieldValue_v2 *values) {
    (void)flags;
    BEGIN_CONNECTED(dcgmEntitiesGetLatestValues, "");
    if (pair_count < 1 || pair_count > 1024 || count < 1 || count > 128)
        return -1;
    for (unsigned int i = 0; i < pair_count; i++)
        for (unsigned int j = 0; j < count; j++) {
            dcgmFieldValue_v2 *value = &values[i * count + j];
            memset(value, 0, sizeof *value);
            value->version = 0x02001020;
            value->entityGroupId = pairs[i].entityGroupId;
            value->entityId = pairs[i].entityId;
            value->fieldId = ids[j];
            value->fieldType = 'i';
            value->status = watched(pairs[i], ids[j]) ? -14 : -16;
        }
    FILE *file = script();
    fill(values, pair_count * count, file);
    if (file)
        fclose(file);
    return 0;
}
